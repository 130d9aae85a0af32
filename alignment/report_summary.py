"""What the renderers share: one line per module over its steps, the first drift and its cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from porter.alignment.report_figures import Row, ratio

SEVERITY = ("drift", "flipped", "inherited", "skipped", "ok")


@dataclass(frozen=True)
class ModuleSummary:
    """One module over all its steps: the worst status, and the row that shows it."""

    module: str
    source: str
    status: str
    worst: Row
    steps: int

    @property
    def ratio(self) -> float | None:
        """Introduced error over its budget at the worst step; None where either was not measured."""
        return ratio(self.worst)


def summarise(rows: Sequence[Row]) -> list[ModuleSummary]:
    """The rows grouped by module, in the order in which the modules first appear."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(str(row["module"]), []).append(row)
    return [_worst(module, group) for module, group in grouped.items()]


def _worst(module: str, rows: Sequence[Row]) -> ModuleSummary:
    rank = min(SEVERITY.index(row["status"]) for row in rows)
    status = SEVERITY[rank]
    candidates = [row for row in rows if row["status"] == status]
    # A module fails where it failed first; a fine one is as good as its tightest step.
    worst = candidates[0] if status != "ok" else max(candidates, key=lambda row: ratio(row) or 0.0)
    return ModuleSummary(module, str(worst.get("source") or ""), status, worst, len(rows))


def row_of_first_drift(report: Mapping[str, Any]) -> Row | None:
    """The module row that `first_drift` points at; None where the drift is not a module's (a parameter's, say)."""
    drift = report["first_drift"]
    if drift is None:
        return None
    rows = [r for r in report["modules"] if r["module"] == drift["module"] and r["step"] == drift["step"]]
    found: Row | None = rows[0] if rows else None
    return found


def causes_of(report: Mapping[str, Any], module: str) -> list[Row]:
    """The causes found for `module`, most confident first."""
    return [cause for cause in report["causes"] if cause["module"] == module]


def leading_cause(report: Mapping[str, Any]) -> Row | None:
    """The most confident cause at the first drift, or else the most confident of all."""
    drift = report["first_drift"]
    if drift is not None:
        module = str(drift["module"])
        here: list[Row] = [
            c for c in report["causes"] if c["module"] == module or str(c["module"]).startswith(module + ".")
        ]
        if here:
            return max(here, key=lambda cause: float(cause["confidence"]))
    causes: Sequence[Row] = report["causes"]
    return causes[0] if causes else None
