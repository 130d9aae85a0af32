"""The alignment report as JUnit XML: a test case per module, so that a build server shows drift as a failed test."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from porter.alignment.report_figures import allowed, differs, measured, number, times
from porter.alignment.report_findings import LintLine, grouped_lint, sanity_of
from porter.alignment.report_headline import headline
from porter.alignment.report_summary import ModuleSummary, causes_of, summarise

NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(report: Mapping[str, Any]) -> str:
    """JUnit XML of a `porter.alignment/1` report.

    Five suites: `verdict` (one case, failing unless aligned, so that an incomparable pair is never green), `checks` (a
    case per check of the captures, failing where one voids the comparison), `contracts` (a case per kind of finding,
    failing where it is certain), `weights` (a case per parameter) and `modules` (a case per module over its steps,
    failing where it drifts).
    """
    root = ElementTree.Element("testsuites", name="porter align")
    _suite(root, "verdict", [report], _verdict)
    _suite(root, "checks", sanity_of(report), _check)
    _suite(root, "contracts", grouped_lint(report), _contract)
    _suite(root, "weights", report["weights"], _weight)
    _suite(root, "modules", summarise(report["modules"]), lambda case, item: _module(case, item, report))
    totals = {key: str(sum(int(s.get(key, "0")) for s in root)) for key in ("tests", "failures", "skipped")}
    for key, total in totals.items():
        root.set(key, total)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(
    root: ElementTree.Element, name: str, items: Sequence[Any], fill: Callable[[ElementTree.Element, Any], None]
) -> None:
    suite = ElementTree.SubElement(root, "testsuite", name=name, errors="0")
    for item in items:
        fill(ElementTree.SubElement(suite, "testcase", classname=f"porter.align.{name}"), item)
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(len(suite.findall("testcase/failure"))))
    suite.set("skipped", str(len(suite.findall("testcase/skipped"))))


def _verdict(case: ElementTree.Element, report: Mapping[str, Any]) -> None:
    case.set("name", "verdict")
    verdict, sentence = headline(report)
    if report["verdict"] != "aligned":
        _fail(case, f"{verdict}: {sentence}", str(report["verdict"]), [str(c["says"]) for c in report["causes"]])


def _check(case: ElementTree.Element, check: Mapping[str, Any]) -> None:
    case.set("name", _clean(f"{check['check']} {check['module']}".strip()))
    said = str(check["says"])
    if check["status"] == "invalid":
        _fail(case, said, "invalid", [])
    elif check["status"] == "uncovered":
        ElementTree.SubElement(case, "skipped", message=_clean(said))
    else:
        ElementTree.SubElement(case, "system-out").text = _clean(f"{check['status']}; {said}")


def _contract(case: ElementTree.Element, line: LintLine) -> None:
    case.set("name", _clean(f"{line.kind} {line.where}"))
    if line.certain:
        _fail(case, line.told, "contract", [line.why])
    else:
        ElementTree.SubElement(case, "system-out").text = _clean(f"warning; {line.told}\n{line.why}")


def _weight(case: ElementTree.Element, weight: Mapping[str, Any]) -> None:
    case.set("name", _clean(weight["parameter"]))
    if weight["status"] == "skipped":
        ElementTree.SubElement(case, "skipped", message="not compared")
    elif weight["status"] == "drift":
        message = f"{differs(weight)}{allowed(weight)}"
        _fail(case, message, "drift", [f"source: {weight['source']}"])


def _module(case: ElementTree.Element, summary: ModuleSummary, report: Mapping[str, Any]) -> None:
    row = summary.worst
    case.set("name", _clean(summary.module or "(model)"))
    why = str(row.get("why") or "")
    figures = f"step {row['step']}: " + ", ".join(f"{what} {figure}" for what, figure in measured(row))
    if summary.status == "skipped":
        ElementTree.SubElement(case, "skipped", message=_clean(why or "not compared"))
    elif summary.status == "drift":
        message = f"introduces {number(row.get('introduced'))}, {times(summary.ratio)} its budget"
        causes = [f"{c['kind']}: {c['says']}" for c in causes_of(report, summary.module)]
        _fail(case, message, "drift", [figures, *filter(None, [why]), *causes])
    else:
        ElementTree.SubElement(case, "system-out").text = _clean(f"{summary.status}; {figures}\n{why}".strip())


def _fail(case: ElementTree.Element, message: str, kind: str, lines: Sequence[str]) -> None:
    failure = ElementTree.SubElement(case, "failure", message=_clean(message), type=kind)
    failure.text = _clean("\n".join(lines))


def _clean(text: Any) -> str:
    """Without the control characters that XML 1.0 cannot hold even when escaped."""
    return NOT_XML.sub("\ufffd", str(text))
