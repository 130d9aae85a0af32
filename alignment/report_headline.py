"""The headline of a report: the verdict, and one sentence that says where and how bad."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from porter.alignment.counterparts import LACKING
from porter.alignment.report_figures import INFINITE, Row, allowed, differs, named, number, percent, ratio, times
from porter.alignment.report_summary import row_of_first_drift, summarise
from porter.alignment.verdict import COVERAGE_NEEDED


def headline(report: Mapping[str, Any]) -> tuple[str, str]:
    """The verdict in capitals, and one sentence that says where and how bad, and in which regime a sweep shows it."""
    verdict = str(report["verdict"])
    sentence = {"aligned": _aligned, "drift": _drifted, "incomparable": _incomparable}[verdict](report)
    regime = (report.get("sweep") or {}).get("says")
    chip = ((report.get("environment") or {}).get("candidate") or {}).get("emulated")
    said = f"{regime}: {sentence}" if regime else sentence
    return verdict.upper(), f"{said} ({chip} emulated on the CPU)" if chip else said


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
        return _drifted_weight(report, drift)
    if row["introduced"] >= INFINITE:
        what = "gives values that are not finite, or of another shape, from"
        return f"{named(drift['module'])} {what} step {drift['step']} on{_lacking(report)}"
    return (
        f"{named(drift['module'])} introduces {number(row['introduced'])} at step {drift['step']}, "
        f"{times(ratio(row))} its budget of {number(row['budget'])}{_lacking(report)}"
    )


def _drifted_weight(report: Mapping[str, Any], drift: Row) -> str:
    """Of a drift that no forward showed: the parameter that shows it."""
    within = f"{drift['module']}." if drift["module"] else ""
    drifted = [w for w in report["weights"] if w["status"] == "drift" and str(w["parameter"]).startswith(within)]
    exactly = [w for w in drifted if w["parameter"] == f"{within}{drift['tensor']}"]
    if exactly and "." in str(drift["tensor"]):
        return f"{exactly[0]['parameter']} {differs(exactly[0])}{allowed(exactly[0])}, in no module that was compared"
    weight = next(iter(exactly or drifted), None)
    error = f" ({weight['parameter']} {differs(weight)})" if weight else ""
    return f"{named(drift['module'])} drifts first, in its {drift['tensor']}{error}"


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
