"""What counts as a difference, and what is said of it."""

from __future__ import annotations

from typing import Any

from benchmarks.torch_npu_wheel import report
from benchmarks.torch_npu_wheel.verdicts import Explained


def findings(**changes: Any) -> dict[str, Any]:
    """Findings of one operator and one port without differences, but for `changes`."""
    run = {"tokens": [[1, 2]], "logits": ["ab"], "calls": {"npu_swiglu": 3}}
    traced = {"calls": {"npu_swiglu": 2}, "logits": [[[2, 7, 9], "torch.bfloat16", "npu"]] * 2, "refused": []}
    whole = {
        "version": "2.13.0",
        "schemas": {"npu_swiglu": []},
        "replayed": [replayed("equal")],
        "failed": [],
        "declared": {"tiny": run},
        "generated": {"tiny": run},
        "traced": {"tiny": {**traced, "stopped": None}},
        "refused": {},
    }
    return {**whole, **changes}


def replayed(verdict: str, detail: str = "", shape: int = 4) -> dict[str, Any]:
    call = {"op": "npu_swiglu", "chip": "ascend-910b", "source": f"test {shape}", "arguments": {}, "outputs": []}
    return {"call": call, "device": "npu", "verdict": verdict, "detail": detail}


def test_nothing_is_a_problem_where_nothing_differs() -> None:
    assert report.problems(findings()) == []
    text = report.markdown(findings())
    assert "1 of 1 schemas equal" in text and "No differences." in text and "bit for bit equal" in text


def test_every_kind_of_difference_is_a_problem() -> None:
    other = {"tokens": [[1, 3]], "logits": ["ab"], "calls": {"npu_swiglu": 3}}
    moved = {"calls": {}, "logits": [[[2, 7, 9], "torch.bfloat16", "cpu"]], "refused": [], "stopped": None}
    for changes, told in (
        ({"schemas": {"npu_swiglu": ["npu_swiglu: dim: default is 0; the wheel has -1"]}}, "npu_swiglu: dim"),
        ({"replayed": [replayed("refused", "RuntimeError: no")]}, "npu_swiglu: refused: RuntimeError: no (1 calls"),
        ({"replayed": [replayed("unbound", "TypeError: no")]}, "npu_swiglu: unbound: TypeError"),
        ({"failed": ["kernel a/b: ZeroDivisionError"]}, "kernel a/b"),
        ({"generated": {"tiny": other}}, "port tiny: tokens differ"),
        ({"traced": {"tiny": moved}}, "port tiny: logits are on cpu"),
        ({"traced": {"tiny": {**moved, "stopped": "KeyError: x"}}}, "port tiny: stopped on fake npu tensors: KeyError"),
    ):
        problems = report.problems(findings(**changes))
        assert len(problems) == 1 and problems[0].startswith(told), problems


def test_differences_of_one_kind_are_one_line() -> None:
    calls = [replayed("different", f"result 0 int8[2, {n}]; vendor's int8[2, {n + 1}]", n) for n in range(5)]
    (line,) = report.problems(findings(replayed=calls))
    assert "(5 calls: test 0 on ascend-910b, test 1 on ascend-910b, test 2 on ascend-910b and 2 more)" in line


def test_an_explained_difference_is_shown_and_no_problem(monkeypatch: Any) -> None:
    monkeypatch.setattr(report, "EXPLAINED", (Explained("npu_swiglu", "refused: no", "the vendor's fault"),))
    found = findings(replayed=[replayed("refused", "no")])
    assert report.problems(found) == []
    assert "| the vendor's fault |" in report.markdown(found)
