"""The HTML report: self-contained, escaped, opened at the fault."""

from __future__ import annotations

import re

import pytest
from sample_reports import FAULT, PARTS, Page, check, drifted, lint, terminal

from porter.alignment.report_html import html
from porter.alignment.report_junit import junit
from porter.alignment.report_summary import summarise


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
    assert f"<title>{FAULT}\ndrift, step 0\nintroduced 0.22 (27.5x its budget of 0.008)" in page


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
