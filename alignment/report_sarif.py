"""The alignment report as SARIF 2.1.0: one result per drift, finding and gap, for the code-scanning views of CI."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from porter.alignment.report_figures import allowed, differs, number, times
from porter.alignment.report_findings import grouped_lint, sanity_of
from porter.alignment.report_headline import headline
from porter.alignment.report_summary import causes_of, summarise

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
RULES = {
    "verdict": "Golden and candidate must be aligned, on enough of the model to say so",
    "drift": "A module introduces no more error than its budget",
    "parameter": "A parameter equals the source's up to what its dtype or scheme costs",
    "contract": "The candidate keeps every number in at least the width that the golden keeps it in",
    "capture": "What was captured can be compared",
    "not-compared": "Every module is compared",
}
SANITY_LEVELS = {"invalid": "error", "uncovered": "warning", "note": "note"}
Result = dict[str, Any]


def sarif(report: Mapping[str, Any]) -> str:
    """SARIF 2.1.0 of a `porter.alignment/1` report.

    Rules are `drift/<cause kind>` (`drift` where no cause is known), `parameter`, `contract/<kind>`, `capture/<check>`,
    `not-compared` and `verdict`. Modules are logical locations; the candidate's file or directory is the physical one
    where it has one. Drifts and certain findings are errors.
    """
    results = [*_verdict(report), *_drifts(report), *_weights(report), *_lint(report), *_sanity(report)]
    results += _skipped(report)
    where = _candidate(report)
    rules = list(dict.fromkeys(str(result["ruleId"]) for result in results))
    for result in results:
        result["ruleIndex"] = rules.index(result["ruleId"])
        if where is not None:
            for location in result["locations"]:
                location["physicalLocation"] = {"artifactLocation": {"uri": where}}
    driver = {"name": "porter align", "version": _version(), "rules": [_rule(rule) for rule in rules]}
    run = {
        "tool": {"driver": driver},
        "results": results,
        "properties": {"verdict": report["verdict"], "coverage": report["coverage"]["parameters"]},
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _version() -> str:
    try:
        return version("porter")
    except PackageNotFoundError:
        return "unknown"


def _rule(rule: str) -> dict[str, Any]:
    family, _, kind = rule.partition("/")
    about = RULES[family] + (f" ({kind})" if kind else "")
    return {"id": rule, "shortDescription": {"text": about}}


def _candidate(report: Mapping[str, Any]) -> str | None:
    """The candidate's file or directory as a relative URI reference; None for a module that has neither."""
    about = report["environment"].get("candidate") or {}
    name = str(about.get("name") or "")
    if about.get("kind") not in ("port", "checkpoint", "python") or not name:
        return None
    path = PurePath(name.rpartition(":")[0] if about["kind"] == "python" else name)
    return quote(path.as_posix().lstrip("/")) or None


def _result(rule: str, level: str, text: str, module: str | None, **properties: Any) -> Result:
    known = {key: value for key, value in properties.items() if value is not None}
    location = {"logicalLocations": [{"fullyQualifiedName": module or "(model)", "kind": "module"}]}
    return {
        "ruleId": rule,
        "level": level,
        "message": {"text": text or rule},
        "locations": [location],
        "partialFingerprints": {"porter/v1": f"{rule}:{module or ''}"},
        **({"properties": known} if known else {}),
    }


def _verdict(report: Mapping[str, Any]) -> Iterator[Result]:
    if report["verdict"] != "aligned":
        verdict, sentence = headline(report)
        drift = report["first_drift"]
        yield _result("verdict", "error", f"{verdict}: {sentence}", None if drift is None else str(drift["module"]))


def _drifts(report: Mapping[str, Any]) -> Iterator[Result]:
    for summary in summarise(report["modules"]):
        if summary.status != "drift":
            continue
        row, causes = summary.worst, causes_of(report, summary.module)
        says = "; ".join([*(str(cause["says"]) for cause in causes[:1]), *filter(None, [str(row.get("why") or "")])])
        figures = f"introduces {number(row.get('introduced'))} at step {row['step']}, {times(summary.ratio)} its budget"
        rule = f"drift/{causes[0]['kind']}" if causes else "drift"
        yield _result(
            rule,
            "error",
            f"{summary.module or '(model)'} {figures}" + (f": {says}" if says else ""),
            summary.module,
            introduced=row.get("introduced"),
            budget=row.get("budget"),
            inherited=row.get("inherited"),
            endToEnd=row.get("end_to_end"),
            step=row["step"],
        )


def _weights(report: Mapping[str, Any]) -> Iterator[Result]:
    for weight in report["weights"]:
        if weight["status"] == "drift":
            text = f"{weight['parameter']} {differs(weight)}{allowed(weight)}"
            yield _result("parameter", "error", text, str(weight["parameter"]))


def _lint(report: Mapping[str, Any]) -> Iterator[Result]:
    for line in grouped_lint(report):
        level = "error" if line.certain else "warning"
        text = f"{line.where}: {line.told}; {line.why}"
        yield _result(f"contract/{line.kind}", level, text, line.modules[0], modules=list(line.modules))


def _sanity(report: Mapping[str, Any]) -> Iterator[Result]:
    for check in sanity_of(report):
        level = SANITY_LEVELS.get(check["status"])
        if level is not None:
            yield _result(f"capture/{check['check']}", level, str(check["says"]), str(check["module"]))


def _skipped(report: Mapping[str, Any]) -> Iterator[Result]:
    for entry in report["coverage"]["skipped"]:
        yield _result("not-compared", "note", f"not compared: {entry['why']}", str(entry["module"]))
    for side in ("golden", "candidate"):
        for name in report["unmatched"][side]:
            yield _result("not-compared", "note", f"only in the {side}", str(name))
