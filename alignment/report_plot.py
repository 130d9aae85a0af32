"""Error by depth as inline SVG: what each module introduces against what it inherits and what it may introduce."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from porter.alignment.report_figures import number, times
from porter.alignment.report_summary import ModuleSummary

WIDTH, HEIGHT = 1120.0, 380.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 14.0, 14.0, 44.0
SMALLEST = 1e-17
LABEL_PIXELS = 52.0
LONGEST = 60
"""Characters of a module's name in the plot: its end tells more than its beginning."""


class Scale:
    """Maps a module's index to x and an error to y on a log axis of whole decades."""

    def __init__(self, count: int, values: Sequence[float]) -> None:
        positive = [v for v in values if v > 0 and math.isfinite(v)] or [1e-6, 1.0]
        self.low = math.floor(math.log10(max(min(positive), SMALLEST)))
        self.high = max(math.ceil(math.log10(max(*positive, SMALLEST))), self.low + 1)
        self.step = (WIDTH - LEFT - RIGHT) / max(count, 1)

    def x(self, index: float) -> float:
        """The horizontal centre of module `index`, in SVG units."""
        return LEFT + (index + 0.5) * self.step

    def y(self, value: float) -> float:
        """The height of an error; zero lies on the axis and infinity at the top."""
        exponent = self.high if not math.isfinite(value) else math.log10(max(value, 10.0**self.low))
        share = (min(exponent, self.high) - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def error_plot(summaries: Sequence[ModuleSummary]) -> str:
    """The SVG of the modules that were measured, in execution order; an empty string when none were."""
    shown = [s for s in summaries if s.worst.get("introduced") is not None]
    if not shown:
        return ""
    keys = ("introduced", "inherited", "budget")
    values = [float(v) for s in shown for key in keys if (v := s.worst.get(key)) is not None]
    scale = Scale(len(shown), values)
    parts = [
        *_axis(scale),
        *_layers(shown, scale),
        _budgets(shown, scale),
        _line(shown, scale, "inherited"),
        *_points(shown, scale),
        *_label(shown, scale),
    ]
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" '
        f'aria-label="Introduced and inherited error of each module in execution order">{"".join(parts)}</svg>'
    )


def _axis(scale: Scale) -> Iterator[str]:
    every = max(1, math.ceil((scale.high - scale.low) / 10))
    for exponent in range(scale.low, scale.high + 1, every):
        y = scale.y(10.0**exponent)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{exponent}</text>'
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield (
        f'<text class="tick" transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">'
        "relative error</text>"
    )


def _layer_of(module: str) -> str:
    """`layers.3` of `model.layers.3.mlp`; an empty string outside a numbered layer."""
    segments = module.split(".")
    for index, segment in enumerate(segments[1:], start=1):
        if segment.isdigit():
            return f"{segments[index - 1]}.{segment}"
    return ""


def _layers(shown: Sequence[ModuleSummary], scale: Scale) -> Iterator[str]:
    start, band, last_label = 0, 0, -LABEL_PIXELS
    names = [_layer_of(s.module) for s in shown]
    for end in range(1, len(names) + 1):
        if end < len(names) and names[end] == names[start]:
            continue
        x, width = scale.x(start) - scale.step / 2, (end - start) * scale.step
        if names[start]:
            if band % 2 == 0:
                yield (
                    f'<rect class="band" x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="{HEIGHT - TOP - BOTTOM}"/>'
                )
            centre = x + width / 2
            if centre - last_label >= LABEL_PIXELS:
                last_label = centre
                below = HEIGHT - BOTTOM + 18
                label = escape(names[start])
                yield f'<text class="tick" x="{centre:.1f}" y="{below}" text-anchor="middle">{label}</text>'
            band += 1
        start = end


def _budgets(shown: Sequence[ModuleSummary], scale: Scale) -> str:
    """The budget of every module as a dash of its own: neighbours of other kinds have nothing to do with each other."""
    half = scale.step / 2
    known = [(i, float(b)) for i, s in enumerate(shown) if (b := s.worst.get("budget")) is not None]
    path = "".join(f"M{scale.x(i) - half:.1f} {scale.y(b):.1f}h{2 * half:.1f}" for i, b in known)
    return f'<path class="line-budget" d="{path}"/>' if path else ""


def _label(shown: Sequence[ModuleSummary], scale: Scale) -> Iterator[str]:
    """The name of the first module that drifts, beside its mark."""
    for index, summary in enumerate(shown):
        if summary.status == "drift":
            x, y = scale.x(index), scale.y(float(summary.worst["introduced"]))
            left = x > WIDTH / 2
            place = f'x="{x + (-12 if left else 12):.1f}" y="{max(y + 4, TOP + 12):.1f}"'
            anchor = "end" if left else "start"
            name = summary.module or "(model)"
            told = name if len(name) <= LONGEST else f"…{name[1 - LONGEST :]}"
            yield f'<text class="fault" {place} text-anchor="{anchor}">{escape(told)}</text>'
            return


def _line(shown: Sequence[ModuleSummary], scale: Scale, key: str) -> str:
    """The measured values of `key` as a line, broken where one was not measured."""
    path, pen_down = [], False
    for index, summary in enumerate(shown):
        value = summary.worst.get(key)
        if value is None:
            pen_down = False
            continue
        x, y = scale.x(index), scale.y(float(value))
        # A module without measured neighbours still shows, as a dash of its own width.
        path.append(f"{'L' if pen_down else 'M'}{x - (0 if pen_down else scale.step / 3):.1f} {y:.1f}L{x:.1f} {y:.1f}")
        pen_down = True
    return f'<path class="line-{key}" d="{"".join(path)}"/>' if path else ""


def _points(shown: Sequence[ModuleSummary], scale: Scale) -> Iterator[str]:
    floor = HEIGHT - BOTTOM
    radius = max(2.0, min(4.0, scale.step * 0.45))
    for index, summary in enumerate(shown):
        x, y = scale.x(index), scale.y(float(summary.worst["introduced"]))
        drifts = summary.status == "drift"
        size = radius + 3 if drifts else radius
        mark = (
            f'<path class="mark drift" d="M{x:.1f} {y - size:.1f}l{size} {size}l-{size} {size}l-{size} -{size}z"/>'
            if drifts
            else f'<circle class="mark {escape(summary.status)}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>'
        )
        stem = f'<line class="stem{" drift" if drifts else ""}" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{floor}"/>'
        yield f"<g>{stem}{mark}<title>{escape(_hover(summary))}</title></g>"


def _hover(summary: ModuleSummary) -> str:
    row: Any = summary.worst
    return (
        f"{summary.module}\n{summary.status}, step {row['step']}\nintroduced {number(row.get('introduced'))}"
        f" ({times(summary.ratio)} its budget of {number(row.get('budget'))})\n"
        f"inherited {number(row.get('inherited'))}\nend to end {number(row.get('end_to_end'))}"
    )
