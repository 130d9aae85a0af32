"""What the renderers share: one line per module over its steps, and the headline of a report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from porter.alignment.counterparts import LACKING

Row = Mapping[str, Any]
SEVERITY = ("drift", "flipped", "inherited", "skipped", "ok")
COVERAGE_NEEDED = 0.95
INFINITE = 1e308
"""What a report has in place of infinity, which JSON does not know."""


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


def ratio(row: Row) -> float | None:
    """`introduced / budget` of a module row, or None."""
    introduced, budget = row.get("introduced"), row.get("budget")
    if introduced is None or not budget:
        return None
    return float(introduced) / float(budget)


def number(value: Any) -> str:
    """A measured figure in at most seven characters; a dash where nothing was measured."""
    if value is None:
        return "-"
    value = float(value)
    if abs(value) >= INFINITE:
        return "inf" if value > 0 else "-inf"
    if value == 0 or (value.is_integer() and abs(value) < 10_000):
        return f"{value:.0f}"
    return f"{value:.3g}" if 0.01 <= abs(value) < 1000 else f"{value:.1e}"


def times(value: float | None) -> str:
    """A ratio as a reader says it, such as `28x`."""
    return "-" if value is None else f"{value:.3g}x" if value < 1000 or math.isinf(value) else f"{value:.1e}x"


def named(module: Any) -> str:
    """A module's name; the whole model has none of its own."""
    return str(module) or "(model)"


def percent(value: Any) -> str:
    """A fraction as a percentage that never rounds up to 100 %."""
    if value is None:
        return "-"
    shown = f"{100 * float(value):.4g}"
    return f"{'>99.99' if shown == '100' and float(value) < 1 else shown} %"


def cosine(value: Any) -> str:
    """A cosine to six digits, never rounded up: 1.000000 means that no digit differs."""
    return "-" if value is None else f"{math.floor(float(value) * 1e6) / 1e6:.6f}"


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


def headline(report: Mapping[str, Any]) -> tuple[str, str]:
    """The verdict in capitals, and one sentence that says where and how bad, and in which regime a sweep shows it."""
    verdict = str(report["verdict"])
    sentence = {"aligned": _aligned, "drift": _drifted, "incomparable": _incomparable}[verdict](report)
    regime = (report.get("sweep") or {}).get("says")
    return verdict.upper(), f"{regime}: {sentence}" if regime else sentence


def _aligned(report: Mapping[str, Any]) -> str:
    modules = summarise(report["modules"])
    ratios = [r for m in modules if (r := m.ratio) is not None]
    tightest = f", the tightest at {times(max(ratios))} its budget" if ratios else ""
    compared = sum(m.status != "skipped" for m in modules)
    parameters = percent(report["coverage"]["parameters"])
    return f"{compared} modules within their budgets{tightest}; {parameters} of the parameters compared"


def _drifted(report: Mapping[str, Any]) -> str:
    drift = report["first_drift"]
    if drift is None:
        drifted = [w["parameter"] for w in report["weights"] if w["status"] == "drift"]
        return f"{len(drifted)} parameters differ, the first {drifted[0]}" if drifted else "see the causes"
    row = row_of_first_drift(report)
    if row is None or row.get("introduced") is None or row["status"] != "drift":
        certain = next((f for f in report.get("lint") or () if f["certain"] and f["module"] == drift["module"]), None)
        if certain is not None and certain["what"] == drift["tensor"]:
            has = f"{certain['what']} is {certain['candidate']} where the golden has {certain['golden']}"
            return f"{named(drift['module'])}: {has}; {certain['why']}"
        own = [w for w in report["weights"] if str(w["parameter"]).startswith(f"{drift['module']}.")]
        weight = next((w for w in own if w["status"] == "drift"), None)
        error = f" ({weight['parameter']} {differs(weight)})" if weight else ""
        return f"{named(drift['module'])} drifts first, in its {drift['tensor']}{error}"
    if row["introduced"] >= INFINITE:
        what = "gives values that are not finite, or of another shape, from"
        return f"{named(drift['module'])} {what} step {drift['step']} on{_lacking(report)}"
    return (
        f"{named(drift['module'])} introduces {number(row['introduced'])} at step {drift['step']}, "
        f"{times(ratio(row))} its budget of {number(row['budget'])}{_lacking(report)}"
    )


def differs(weight: Row) -> str:
    """How a parameter differs; where no number says it, why."""
    error = weight["error"]
    if error is None or float(error) >= INFINITE:
        return str(weight.get("why") or "holds values that are not finite")
    return f"differs by {number(error)}"


def _lacking(report: Mapping[str, Any]) -> str:
    """What to add where whole modules of the golden's model are not there."""
    missing = [str(each["module"]) for each in report["coverage"]["skipped"] if str(each["why"]).startswith(LACKING)]
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"; the candidate has no {missing[0]}{more}" if missing else ""


def _reason(report: Mapping[str, Any]) -> str:
    """The reason that most of what was not compared has in common."""
    reasons = Counter(str(each["why"]) for each in report["coverage"]["skipped"])
    return f": {reasons.most_common(1)[0][0]}" if reasons else ""


def _incomparable(report: Mapping[str, Any]) -> str:
    coverage = report["coverage"]
    void = next((check for check in report.get("sanity") or () if check["status"] == "invalid"), None)
    if void is not None:
        return str(void["says"])
    if float(coverage["parameters"]) < COVERAGE_NEEDED:
        return (
            f"only {percent(coverage['parameters'])} of the parameters were compared "
            f"({percent(COVERAGE_NEEDED)} needed), so nothing can be said{_lacking(report) or _reason(report)}"
        )
    skipped = coverage["skipped"]
    return f"{named(skipped[0]['module'])}: {skipped[0]['why']}" if skipped else "the two cannot be compared"
