"""The lists for machines: JUnit and SARIF."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest
from sample_reports import FAULT, REPORTS, aligned, drifted, incomparable

from porter.alignment.report_junit import junit
from porter.alignment.report_sarif import sarif


@pytest.mark.parametrize("name", REPORTS)
def test_sarif_names_every_finding_and_its_rule(name: str) -> None:
    report = REPORTS[name]()
    log = json.loads(sarif(report))
    assert log["version"] == "2.1.0" and log["$schema"].endswith("sarif-schema-2.1.0.json")
    (run,) = log["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(rules) == len(set(rules))
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"] and result["message"]["text"]
        (location,) = result["locations"]
        assert location["logicalLocations"][0]["fullyQualifiedName"]
        assert location["physicalLocation"]["artifactLocation"]["uri"] == "ports/my%20port"
    errors = {result["ruleId"] for result in run["results"] if result["level"] == "error"}
    assert errors == {"aligned": set(), "drift": {"verdict", "drift/rope-style"}, "incomparable": {"verdict"}}[name]
    assert ("not-compared" in rules) == (name == "incomparable")


def test_sarif_of_a_module_has_no_physical_location() -> None:
    report = drifted()
    report["environment"]["candidate"] = {"kind": "module", "name": "Qwen2ForCausalLM"}
    report["modules"][0].update(status="drift", module="", introduced=float(2**60))
    for result in json.loads(sarif(report))["runs"][0]["results"]:
        assert "physicalLocation" not in result["locations"][0]


def test_junit_has_a_case_per_module_and_fails_the_drifting_one_with_why() -> None:
    report = drifted()
    root = ElementTree.fromstring(junit(report).encode())
    suites = {suite.get("name"): suite for suite in root}
    cases = {case.get("name"): case for case in suites["modules"]}
    assert set(cases) == {entry["module"] for entry in report["modules"]}
    failed = [name for name, case in cases.items() if case.find("failure") is not None]
    assert failed == [FAULT]
    failure = cases[FAULT].find("failure")
    assert failure is not None and "27.5x" in str(failure.get("message"))
    assert "over its budget" in str(failure.text) and "rope-style" in str(failure.text)
    assert (suites["modules"].get("failures"), root.get("failures")) == ("1", "2")


def test_junit_is_never_green_when_incomparable() -> None:
    root = ElementTree.fromstring(junit(incomparable()).encode())
    verdict = root.find("testsuite[@name='verdict']/testcase/failure")
    assert verdict is not None and "40 %" in str(verdict.get("message"))
    skipped = {suite.get("name"): suite.get("skipped") for suite in root}
    assert skipped == {"verdict": "0", "checks": "1", "contracts": "0", "weights": "0", "modules": "1"}
    assert ElementTree.fromstring(junit(aligned()).encode()).get("failures") == "0"


def test_junit_survives_control_characters() -> None:
    report = drifted()
    report["causes"][0]["says"] = "bad \x00 byte and \x1b escape"
    ElementTree.fromstring(junit(report).encode())
