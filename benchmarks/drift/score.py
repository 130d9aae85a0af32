"""Scores of outcomes, as data and as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.drift.judge import CRASHED, Outcome


def mark(outcome: Outcome) -> str:
    """In a word, what came of a case."""
    if outcome.verdict == CRASHED:
        return "CRASHED"
    if not outcome.fault:
        return "FALSE ALARM" if outcome.false_alarm else "aligned"
    if not outcome.counts:
        return "small, drift" if outcome.detected else "small"
    if not outcome.detected:
        return "MISSED"
    if not outcome.located:
        return "WRONG MODULE"
    return "right" if outcome.explained else "WRONG CAUSE"


def line(outcome: Outcome) -> str:
    """One outcome in one line."""
    said = f"{outcome.verdict} {outcome.first or ''} {','.join(outcome.causes)} {outcome.error[:120]}".strip()
    true = (
        f"{outcome.modules[0][0]} {'|'.join(outcome.kinds)} {outcome.excess:.3g}x"
        if outcome.fault and outcome.excess is not None
        else "legitimate"
    )
    return f"{mark(outcome):13} {outcome.id} {outcome.pair} {outcome.seconds:.2f}s  true: {true}  said: {said}"


def summary(outcomes: Sequence[Outcome], theirs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Counts and every outcome; `theirs` are msprobe's verdicts by case id."""
    faults = [o for o in outcomes if o.fault]
    counted = [o for o in faults if o.counts]
    legitimate = [o for o in outcomes if not o.fault]
    seconds = [o.seconds for o in outcomes]
    wrong = [o for o in [*counted, *legitimate] if mark(o) not in ("right", "aligned")]
    found: dict[str, Any] = {
        "faults": len(faults),
        "over_twice_the_floor": len(counted),
        "detected": sum(o.detected for o in counted),
        "located": sum(o.located for o in counted),
        "explained": sum(o.explained for o in counted),
        "small_detected": sum(o.detected for o in faults if not o.counts),
        "legitimate": len(legitimate),
        "false_alarms": sum(o.false_alarm for o in legitimate),
        "seconds_median": statistics.median(seconds) if seconds else 0.0,
        "seconds_max": max(seconds, default=0.0),
        "seconds_total": sum(seconds),
        "misjudged": [line(o) for o in wrong],
        "by_kind": _by_kind(counted),
        "outcomes": [o.data() for o in outcomes],
    }
    if theirs is not None:
        found["msprobe"] = _theirs(counted, legitimate, theirs)
    return found


def _by_kind(counted: Sequence[Outcome]) -> dict[str, list[int]]:
    """Kind -> [cases, detected, located, explained]."""
    table: dict[str, list[int]] = {}
    for o in counted:
        row = table.setdefault(o.kinds[0], [0, 0, 0, 0])
        for index, value in enumerate((True, o.detected, o.located, o.explained)):
            row[index] += value
    return dict(sorted(table.items()))


def _theirs(counted: Sequence[Outcome], legitimate: Sequence[Outcome], theirs: Mapping[str, Any]) -> dict[str, Any]:
    ran = [o for o in counted if o.id in theirs and "failed" not in theirs[o.id]]
    sound = [o for o in legitimate if o.id in theirs and "failed" not in theirs[o.id]]
    times = [row["seconds"] for row in theirs.values() if "seconds" in row]
    return {
        "faults": len(ran),
        "detected": sum(theirs[o.id]["error"] > 0 for o in ran),
        "detected_with_warnings": sum(theirs[o.id]["error"] + theirs[o.id]["warning"] > 0 for o in ran),
        "located": sum(theirs[o.id]["first"] in o.modules[0] for o in ran),
        "porter": {
            "detected": sum(o.detected for o in ran),
            "located": sum(o.located for o in ran),
            "explained": sum(o.explained for o in ran),
            "false_alarms": sum(o.false_alarm for o in sound),
        },
        "legitimate": len(sound),
        "false_alarms": sum(theirs[o.id]["error"] > 0 for o in sound),
        "false_alarms_with_warnings": sum(theirs[o.id]["error"] + theirs[o.id]["warning"] > 0 for o in sound),
        "differs_from_healthy": sum(theirs[o.id].get("differs", False) for o in ran),
        "seconds_median": statistics.median(times) if times else 0.0,
        "failed": sorted(id for id, row in theirs.items() if "failed" in row),
        "outcomes": dict(theirs),
    }


def markdown(found: Mapping[str, Any]) -> str:
    """The score table, porter beside msprobe on the cases that msprobe ran, and what porter misjudged."""
    counted, legit = found["over_twice_the_floor"], found["legitimate"]
    rows = [
        ("planted faults (over twice the floor)", f"{found['faults']} ({counted})"),
        *((words, _share(found[name], counted)) for name, words in SCORES),
        ("false alarms", _share(found["false_alarms"], legit)),
        ("seconds of CPU a case, median", f"{found['seconds_median']:.2f}"),
    ]
    table = ["| | porter |", "|---|---|", *(f"| {name} | {ours} |" for name, ours in rows)]
    kinds = [f"| {kind} | {' | '.join(map(str, row))} |" for kind, row in found["by_kind"].items()]
    kinds = ["", "| kind | cases | detected | module | cause |", "|---|---|---|---|---|", *kinds]
    total = (
        f"{counted + legit} cases judged in {found['seconds_total']:.0f} s of CPU, {len(found['misjudged'])} wrongly."
    )
    beside = ["", *_beside(found["msprobe"])] if "msprobe" in found else []
    return "\n".join([*table, *beside, *kinds, "", *(f"- `{each}`" for each in found["misjudged"]), "", total])


SCORES = (("detected", "detected"), ("located", "right module first"), ("explained", "right cause first"))


def _beside(theirs: Mapping[str, Any]) -> list[str]:
    """porter and msprobe on the same cases."""
    faults, legit, ours = theirs["faults"], theirs["legitimate"], theirs["porter"]
    rows = [(words, _share(ours[n], faults), _share(theirs[n], faults) if n in theirs else "-") for n, words in SCORES]
    rows.append(("false alarms", _share(ours["false_alarms"], legit), _share(theirs["false_alarms"], legit)))
    rows.append(("says other than without the fault", "-", _share(theirs["differs_from_healthy"], faults)))
    rows.append(("seconds of CPU a case, median", "-", f"{theirs['seconds_median']:.2f}"))
    return ["| the same cases | porter | msprobe |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}" + (f" ({100 * part / whole:.1f} %)" if whole else "")
