"""The renderers, from the JSON of a report alone: every verdict, headlines, figures, large models, old reports."""

from __future__ import annotations

import copy
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import jsonschema
import pytest
from sample_reports import FAULT, REPORTS, Page, aligned, check, drifted, incomparable, lint, row, terminal

from porter.alignment.report import Cause, FirstDrift, ModuleRow, Report
from porter.alignment.report_figures import cosine, number, percent, times
from porter.alignment.report_headline import headline
from porter.alignment.report_html import html
from porter.alignment.report_junit import junit
from porter.alignment.report_sarif import sarif
from porter.alignment.report_summary import summarise

SCHEMA = json.loads((Path(__file__).parents[1] / "alignment.schema.json").read_text())


@pytest.mark.parametrize("name", REPORTS)
def test_sample_reports_satisfy_the_contract(name: str) -> None:
    jsonschema.validate(REPORTS[name](), SCHEMA)


@pytest.mark.parametrize("name", REPORTS)
def test_every_verdict_renders_everywhere(name: str) -> None:
    report = REPORTS[name]()
    before = copy.deepcopy(report)
    text, page, xml = terminal(report), html(report), junit(report)
    assert text.startswith(name.upper() + "  ")
    assert Page(page).open == []
    ElementTree.fromstring(xml.encode())
    assert report == before, "a renderer changed the report"


def test_terminal_says_where_and_why_in_its_first_two_lines() -> None:
    lines = terminal(drifted()).splitlines()
    assert FAULT in lines[0] and "0.22" in lines[0] and "27.5x" in lines[0]
    assert lines[1].startswith("cause  rope-style (99 %)") and "rope/half" in lines[1]


def test_terminal_opens_the_fault_and_collapses_the_rest() -> None:
    text = terminal(drifted(layers=61))
    assert "0-2  21 within budget" in text
    assert "inherited error" in text and "self_attn  DRIFT" in text
    assert len(text.splitlines()) < 40, "a 61-layer model still fits on a screen"
    assert len(terminal(aligned(layers=61)).splitlines()) < 20


def test_terminal_is_plain_text_off_a_terminal_and_lists_what_was_not_compared() -> None:
    text = terminal(incomparable())
    assert "\x1b" not in text
    assert "model.layers.1.mlp: not recorded" in text
    assert "only in the golden: model.layers.9" in text and "only in the candidate: mtp.0" in text
    assert "40 % of the parameters" in text


def test_module_with_a_failing_later_step_is_not_summarised_as_fine() -> None:
    rows = [row("mlp"), row("mlp", step=1, status="drift", introduced=0.5), row("mlp", step=2, introduced=7e-3)]
    (summary,) = summarise(rows)
    assert (summary.status, summary.worst["step"], summary.steps) == ("drift", 1, 3)


def test_drift_in_a_parameter_alone_has_a_headline() -> None:
    report = aligned()
    report.update(verdict="drift", modules=[])
    report["weights"][0].update(status="drift", error=0.5)
    report["first_drift"] = {"module": "lm_head", "source": "lm_head", "step": 0, "tensor": "weight"}
    assert headline(report) == ("DRIFT", "lm_head drifts first, in its weight (lm_head.weight differs by 0.5)")
    assert "lm_head.weight: differs by 0.5" in terminal(report)
    assert Page(html(report)).open == []


def test_what_all_layers_have_in_common_takes_one_line() -> None:
    text = terminal(aligned(layers=61))
    assert "contracts     1 kept less well" in text
    assert "model.layers.0.mlp.gate (and 60 more): weight is bfloat16, float32 in the golden; close scores" in text
    assert "uncovered: model.layers.*.mlp.kernel" in text and "layer-chain" not in text
    page = html(aligned(layers=61))
    assert page.count("router-dtype") == 1 and "model.layers.60.mlp.gate" in page


def test_a_check_that_voids_the_comparison_is_the_headline() -> None:
    report = aligned()
    says = "prompt 0: only the candidate begins with token 1 (add_bos_token?): record both alike"
    report["sanity"].append(check("token-ids", "", "invalid", says))
    report["verdict"] = "incomparable"
    assert headline(report) == ("INCOMPARABLE", says)
    assert terminal(report).count(f"invalid: {says}") == 1
    root = ElementTree.fromstring(junit(report).encode())
    assert [s.get("failures") for s in root] == ["1", "1", "0", "0", "0"]
    report.update(verdict="drift", first_drift=drifted()["first_drift"], causes=drifted()["causes"])
    assert "check first" in html(report)


def test_a_certain_finding_has_a_headline() -> None:
    report = aligned()
    gate = "model.layers.2.mlp.gate"
    report["lint"] = [lint(gate, certain=True)]
    report.update(verdict="drift", first_drift={"module": gate, "source": gate, "step": 0, "tensor": "weight"})
    assert headline(report)[1].startswith(f"{gate}: weight is bfloat16 where the golden has float32; close scores")
    results = json.loads(sarif(report))["runs"][0]["results"]
    assert ("contract/router-dtype", "error") in {(r["ruleId"], r["level"]) for r in results}


def test_reports_of_before_there_were_checks_still_render() -> None:
    report = drifted()
    del report["sanity"], report["lint"]
    assert terminal(report) and Page(html(report)).open == [] and junit(report) and sarif(report)


def test_the_repr_of_a_report_is_short() -> None:
    rows = [ModuleRow(f"model.layers.{i}", f"model.layers.{i}", 0) for i in range(500)]
    report = Report("drift", FirstDrift(FAULT, FAULT, 0), [Cause("rope-style", FAULT, 0.9, 1.0, 0.0, "x" * 99)])
    report.modules = rows
    assert repr(report) == f"Report(drift, first drift {FAULT} at step 0, rope-style, 500 rows, 0 parameters)"


def test_a_cosine_never_rounds_up_to_one() -> None:
    assert cosine(0.9999999) == "0.999999" and cosine(1.0) == "1.000000" and cosine(-1.0) == "-1.000000"
    assert cosine(None) == "-"


def test_numbers_never_flatter() -> None:
    assert percent(0.99999999) == ">99.99 %" and percent(1) == "100 %" and percent(None) == "-"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, "-"), (0.0, "0"), (2.0, "2"), (1234.0, "1234"), (0.0312, "0.0312"), (0.0039062, "0.0039"),
        (27.46, "27.5"), (1.5e-7, "1.5e-7"), (9.96e-4, "0.001"), (4e-10, "4e-10"), (-0.25, "-0.25"),
        (80_421.7, "80,400"),
        (999_499.0, "999,000"), (999_600.0, "1e6"), (3.21e9, "3.2e9"), (float("inf"), "inf"), (-1e308, "-inf"),
    ],
)  # fmt: skip
def test_figures_read_as_a_person_writes_them(value: float | None, written: str) -> None:
    assert number(value) == written and len(written) <= 8
    assert times(value) == (written if value is None else f"{written}x")


def test_a_cause_that_could_not_be_undone_has_no_figure_for_it() -> None:
    report = drifted()
    report["causes"][0].update(kind="unknown", after=None)
    text = terminal(report)
    assert "  [error 0.22]" in text and "[error 0.22]" in html(report) and "after" not in text
    assert "  [error 0.22 before, 2e-7 after]" in terminal(drifted())


def test_only_what_was_measured_is_listed() -> None:
    report = drifted()
    fault = next(each for each in report["modules"] if each["module"] == FAULT)
    fault.update(inherited=None, end_to_end=None)
    (line,) = [line for line in terminal(report).splitlines() if "self_attn  DRIFT" in line]
    assert line.endswith("self_attn  DRIFT  introduced 0.22  budget 0.008 (27.5x)")


@pytest.mark.parametrize("module", ["", "model"])
def test_a_parameter_outside_of_every_paired_module_is_named(module: str) -> None:
    report = aligned()
    way = "extra.scale" if module else "model.extra.scale"
    weight = {"parameter": "model.extra.scale", "source": "model.extra.scale", "error": 0.5, "expected": 2e-3}
    report["weights"].append({**weight, "status": "drift"})
    report.update(verdict="drift", first_drift={"module": module, "source": module, "step": 0, "tensor": way})
    said = "model.extra.scale differs by 0.5, expected 0.002, in no module that was compared"
    assert headline(report) == ("DRIFT", said)
