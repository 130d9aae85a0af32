"""The renderers, from the JSON of a report alone: every verdict, hostile names, missing figures, large models."""

from __future__ import annotations

import copy
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.console import Console

from porter.alignment.report import Cause, FirstDrift, ModuleRow, Report
from porter.alignment.report_html import html
from porter.alignment.report_junit import junit
from porter.alignment.report_sarif import sarif
from porter.alignment.report_summary import cosine, headline, number, percent, summarise
from porter.alignment.report_terminal import print_report

SCHEMA = json.loads((Path(__file__).parents[1] / "alignment.schema.json").read_text())
PARTS = ("input_layernorm", "self_attn.qkv_proj", "self_attn.o_proj", "self_attn", "mlp.gate_up_proj", "mlp", "")
FAULT = "model.layers.3.self_attn"


def row(module: str, status: str = "ok", introduced: float | None = 1e-3, **more: Any) -> dict[str, Any]:
    measured = {"introduced": introduced, "inherited": 4e-3, "end_to_end": 5e-3, "budget": 8e-3, "cosine": 0.99999}
    known = {"module": module, "source": module, "step": 0, "op": "linear/standard", "provider": "cpu", "why": ""}
    return {**known, **measured, "status": status, **more}


def aligned(layers: int = 6) -> dict[str, Any]:
    modules = [row("model.embed_tokens")]
    modules += [row(f"model.layers.{i}.{p}".rstrip(".")) for i in range(layers) for p in PARTS]
    modules += [row("model.norm"), row("lm_head"), row("lm_head", step=1)]
    return {
        "schema": "porter.alignment/1",
        "verdict": "aligned",
        "first_drift": None,
        "causes": [],
        "tokens": {"compared": 64, "top1_agreement": 1.0, "kl_mean": 1e-6, "kl_max": 3e-5, "first_divergence": None},
        "routing": {"decisions": 4096, "flips": 3, "benign": 3},
        "coverage": {"modules": 1.0, "parameters": 1.0, "flops": 0.99, "skipped": []},
        "weights": [
            {"parameter": "lm_head.weight", "source": "lm_head.weight", "error": 0.0, "expected": 0.0, "status": "ok"}
        ],
        "modules": modules,
        "unmatched": {"golden": [], "candidate": []},
        "environment": {
            "golden": {"dtype": "bfloat16"},
            "candidate": {"dtype": "float32", "kind": "port", "name": "/ports/my port"},
        },
        "sanity": [
            check("layer-chain", "model.layers", "ok", "golden: out[i] is in[i+1] at 5 of 5 places"),
            check("gap", "model.layers.*.mlp.kernel", "uncovered", "candidate: 6 modules, the first ...: never called"),
        ],
        "lint": [lint(f"model.layers.{i}.mlp.gate") for i in range(layers)],
    }


def check(name: str, module: str, status: str, says: str) -> dict[str, Any]:
    return {"check": name, "module": module, "status": status, "says": says}


def lint(module: str, certain: bool = False) -> dict[str, Any]:
    known = {"kind": "router-dtype", "module": module, "what": "weight", "golden": "float32", "candidate": "bfloat16"}
    return {**known, "certain": certain, "why": "close scores change order"}


def drifted(layers: int = 6) -> dict[str, Any]:
    report = aligned(layers)
    for entry in report["modules"]:
        if entry["module"] == FAULT:
            entry.update(status="drift", introduced=0.22, inherited=3e-3, end_to_end=0.23, why="over its budget")
        elif entry["module"] in ("model.layers.3", "model.norm", "lm_head") or re.match(
            r"model\.layers\.[45]", entry["module"]
        ):
            entry.update(status="inherited", inherited=0.31, end_to_end=0.4)
    cause = {"kind": "rope-style", "module": FAULT, "confidence": 0.99, "before": 0.22, "after": 2e-7}
    report.update(
        verdict="drift",
        first_drift={"module": FAULT, "source": FAULT, "step": 0, "tensor": "output"},
        causes=[{**cause, "says": "Rotary pairs are interleaved here but half-split in the source; use rope/half."}],
    )
    report["tokens"]["first_divergence"] = 17
    return report


def incomparable() -> dict[str, Any]:
    report = aligned()
    report["verdict"] = "incomparable"
    report["coverage"] = {
        "modules": 0.5,
        "parameters": 0.4,
        "flops": None,
        "skipped": [{"module": "model.layers.1.mlp", "why": "not recorded"}],
    }
    report["modules"][3].update(
        status="skipped", introduced=None, inherited=None, end_to_end=None, budget=None, cosine=None, why="not recorded"
    )
    report["unmatched"] = {"golden": ["model.layers.9"], "candidate": ["mtp.0"]}
    report["tokens"] = report["routing"] = None
    return report


REPORTS = {"aligned": aligned, "drift": drifted, "incomparable": incomparable}


def terminal(report: dict[str, Any]) -> str:
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=120))
    return stream.getvalue()


class Page(HTMLParser):
    """Checks that tags balance, and keeps what a browser would load or run."""

    VOID = frozenset({"meta", "input", "line", "circle", "rect", "path"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.feed(text)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value) for key, value in attrs]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value) for key, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


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


def test_html_escapes_and_fetches_nothing() -> None:
    report = drifted()
    hostile = '<script>alert("x")</script>\'"&'
    report["causes"][0]["says"] = report["modules"][4]["why"] = report["causes"][0]["kind"] = hostile
    report["causes"][0]["module"] = report["first_drift"]["module"] = report["modules"][24]["module"] = hostile
    for index, layer in ((25, 3), (26, 4)):
        report["modules"][index]["module"] = f"model.layers.{layer}.{hostile}"
    report["sanity"] = [check(hostile, hostile, status, hostile) for status in ("invalid", "note", "uncovered", "ok")]
    report["lint"] = [{**lint(hostile), "kind": hostile, "what": hostile, "golden": hostile, "why": hostile}]
    report["modules"][4]["module"] = report["modules"][4]["provider"] = hostile
    report["environment"]["golden"] = {hostile: hostile}
    report["coverage"]["skipped"] = [{"module": hostile, "why": hostile}]
    report["unmatched"]["golden"] = [hostile]
    report["weights"][0]["parameter"] = hostile
    page = html(report)
    assert "<script>alert" not in page
    parsed = Page(page)
    assert parsed.open == []
    loaded = [value for _, key, value in parsed.attributes if key in ("src", "href", "data", "action", "srcset")]
    assert loaded == [] and "http://" not in page and "https://" not in page and "url(" not in page
    assert not any(key.startswith("on") for _, key, _ in parsed.attributes)


def test_html_plot_has_one_point_per_measured_module_with_its_figures() -> None:
    report = drifted()
    page = html(report)
    measured = [s for s in summarise(report["modules"]) if s.worst["introduced"] is not None]
    depth, siblings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert depth.count("<title>") == len(measured)
    assert depth.count('class="mark drift"') == 1 and f">{FAULT}</text>" in depth
    assert siblings.count("<title>") == 6 * len(PARTS) and siblings.count('class="mark sibling drift"') == 1
    assert f"<title>{FAULT}: 27.5x its budget, drift</title>" in siblings
    assert f"<title>{FAULT}\ndrift, step 0\nintroduced 0.22 (27.5x its budget of 8.0e-03)" in page


@pytest.mark.parametrize("value", [0.0, 1e-300, 1e300, float("inf")])
def test_extreme_and_missing_errors_render(value: float) -> None:
    report = drifted()
    report["modules"][2].update(introduced=value, inherited=None, budget=0.0, cosine=None)
    page = html(report)
    assert "nan" not in re.sub(r"<title>.*?</title>", "", page.lower()).replace("dominant", "")
    terminal(report), junit(report)


def test_html_opens_the_tree_at_the_fault_without_a_script() -> None:
    tree = html(drifted(layers=61)).split("<div class=tree>")[1].split("<h2>")[0]
    opened, _, rest = tree.partition("<div class=story>")
    assert opened.endswith("</small></summary>") and opened.count("<details open>") == 4
    assert "over its budget" in rest and "rope-style" in rest and "use rope/half" in rest
    assert "<b>0-2</b>" in opened and "21 within budget" in opened


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


def test_numbers_never_flatter() -> None:
    assert percent(0.99999999) == ">99.99 %" and percent(1) == "100 %" and percent(None) == "-"
    assert number(None) == "-" and number(0.0) == "0" and number(1.5e-7) == "1.5e-07" and number(0.0312) == "0.0312"
