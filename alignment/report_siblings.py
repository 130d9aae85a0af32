"""The same module over all layers as inline SVG: who stands out among its siblings, even within its budget."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from html import escape

from porter.alignment.report_figures import times
from porter.alignment.report_summary import ModuleSummary

WIDTH, LEFT, RIGHT, TOP, ROW, BOTTOM = 1120.0, 300.0, 20.0, 10.0, 20.0, 30.0
LEAST = 1e-4
"""Ratios below are drawn here: far within the budget is far within."""
MOST_ROWS = 40
LONGEST = 44


def siblings_plot(summaries: Sequence[ModuleSummary]) -> str:
    """One row per kind of module that several layers have; an empty string where there is none."""
    rows = _rows(summaries)
    if not rows:
        return ""
    ratios = [max(ratio, LEAST) for group in rows.values() for _, ratio in group]
    low, high = math.floor(math.log10(min(ratios))), max(1, math.ceil(math.log10(max(*ratios, 1.0))))
    height = TOP + ROW * len(rows) + BOTTOM
    parts = [*_axis(low, high, height)]
    for index, (kind, group) in enumerate(rows.items()):
        parts += _row(kind, group, TOP + ROW * (index + 0.5), low, high)
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" '
        f'aria-label="Introduced error over budget of each kind of module, one point per layer">{"".join(parts)}</svg>'
    )


def _rows(summaries: Sequence[ModuleSummary]) -> dict[str, list[tuple[ModuleSummary, float]]]:
    found: dict[str, list[tuple[ModuleSummary, float]]] = {}
    for summary in summaries:
        kind = re.sub(r"(?<![^.])\d+(?![^.])", "*", summary.module)
        if kind != summary.module and summary.ratio is not None and math.isfinite(summary.ratio):
            found.setdefault(kind, []).append((summary, summary.ratio))
    several = {kind: group for kind, group in found.items() if len(group) > 1}
    if len(several) > MOST_ROWS:
        worst = sorted(several, key=lambda kind: -max(ratio for _, ratio in several[kind]))[:MOST_ROWS]
        several = {kind: group for kind, group in several.items() if kind in worst}
    return several


def _x(ratio: float, low: int, high: int) -> float:
    share = (math.log10(min(max(ratio, 10.0**low), 10.0**high)) - low) / (high - low)
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _axis(low: int, high: int, height: float) -> Iterator[str]:
    every = max(1, math.ceil((high - low) / 10))
    floor = height - BOTTOM
    for exponent in sorted({*range(low, high + 1, every), 0}):
        x = _x(10.0**exponent, low, high)
        limit = " limit" if exponent == 0 else ""
        yield f'<line class="grid{limit}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{floor:.1f}"/>'
        label = "budget" if exponent == 0 else f"1e{exponent}"
        yield f'<text class="tick" x="{x:.1f}" y="{floor + 18:.1f}" text-anchor="middle">{label}</text>'


def _row(kind: str, group: Sequence[tuple[ModuleSummary, float]], y: float, low: int, high: int) -> Iterator[str]:
    shown = kind if len(kind) <= LONGEST else f"…{kind[1 - LONGEST :]}"
    yield f'<text class="tick kind" x="{LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(shown)}</text>'
    for summary, ratio in sorted(group, key=lambda item: item[0].status == "drift"):
        x = _x(ratio, low, high)
        title = f"<title>{escape(f'{summary.module}: {times(ratio)} its budget, {summary.status}')}</title>"
        status = escape(summary.status)
        yield f'<g><circle class="mark sibling {status}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>{title}</g>'
