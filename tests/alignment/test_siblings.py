"""Outliers among siblings: a fault within the budget that no other layer shows; legitimate roundings are none."""

from __future__ import annotations

import copy
import json
import types
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from planted import bfloat16, golden_of, qwen2
from torch import nn

from porter.alignment.align import align
from porter.alignment.budget import Verdict
from porter.alignment.module_result import ModuleResult
from porter.alignment.pairing import Pair
from porter.alignment.siblings import Siblings

SCHEMA = json.loads((Path(__file__).parents[1] / "alignment.schema.json").read_text())
LAYERS = 8


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    model = qwen2(layers=LAYERS)
    return model, golden_of(model, tmp_path_factory.mktemp("siblings") / "golden", new_tokens=2)


def other_chip(model: nn.Module) -> Any:
    """Linear layers that add up pieces of K backwards in float32, norms that round once."""

    def linear(self: Any, x: torch.Tensor) -> torch.Tensor:
        pieces = [x[..., k : k + 16].float() @ self.weight[:, k : k + 16].float().T for k in range(0, x.shape[-1], 16)]
        total = sum(reversed(pieces), start=torch.zeros(()))
        return (total if self.bias is None else total + self.bias.float()).to(x.dtype)

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * scale * self.weight.float()).to(x.dtype)

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = types.MethodType(linear, module)
        elif hasattr(module, "variance_epsilon"):
            module.forward = types.MethodType(norm, module)
    return model


def recorded(golden: Any, candidate: nn.Module, path: Path) -> Any:
    report = align(golden, golden_of(candidate, path, new_tokens=2))
    jsonschema.validate(report.to_json(), SCHEMA)
    return report


@pytest.mark.parametrize("chip", [bfloat16, lambda m: other_chip(bfloat16(m))], ids=["same-chip", "other-chip"])
def test_recorded_eps_within_the_budget_is_an_outlier(dense: Any, tmp_path: Path, chip: Any) -> None:
    model, golden = dense
    assert recorded(golden, chip(model), tmp_path / "right").verdict == "aligned"
    candidate = chip(model)
    name = "model.layers.5.post_attention_layernorm"
    candidate.get_submodule(name).variance_epsilon = 1e-2
    report = recorded(golden, candidate, tmp_path / "wrong")
    assert report.verdict == "drift"
    assert report.first_drift is not None and report.first_drift.module == name
    rows = [row for row in report.modules if row.status == "drift"]
    assert {row.module for row in rows} == {name}
    for row in rows:
        assert row.introduced > row.budget
        assert f"its {LAYERS - 1} siblings" in row.why


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_another_chips_rounding_is_no_outlier(dense: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    model, golden = dense
    report = recorded(golden, other_chip(copy.deepcopy(model).to(dtype)), tmp_path / "other")
    assert report.verdict == "aligned", report.first_drift


def results(errors: list[float], gains: list[float]) -> Siblings:
    siblings = Siblings()
    for layer, (error, gain) in enumerate(zip(errors, gains, strict=True)):
        pair = Pair(f"layers.{layer}.norm", (f"layers.{layer}.norm",), layer)
        verdict = Verdict("output", error, 2.0, 1.0, gain, 0.01)
        siblings.add(ModuleResult(pair, (), tensors=[[verdict]], native=[verdict]))
    return siblings


def test_size_and_gain_and_their_limits() -> None:
    usual, none = [1.0, 0.98, 1.01, 0.99, 1.02], [0.0] * 5
    assert not results(usual, none).outliers()
    (large,) = results([*usual, 1.6], [*none, 0.0]).outliers()
    assert (large.module, large.siblings, round(large.times, 1)) == ("layers.5.norm", 5, 1.6)
    assert 1.15 <= large.allowed < 1.6
    (scaled,) = results([*usual, 1.0], [*none, 0.5]).outliers()
    assert (scaled.module, scaled.gain) == ("layers.5.norm", 0.5)
    tightened = scaled.tightened(Verdict("output", 1.0, 2.0, 1.0, 0.5, 0.01))
    assert tightened.over and tightened.budget > (1.0 - 0.5**2) ** 0.5
    assert not scaled.tightened(Verdict("output", 1.0, 2.0, 1.0, 0.0, 0.01)).over


def test_too_few_siblings_and_wide_spreads_tell_nothing() -> None:
    assert not results([1.0, 1.0, 1.0, 1.9], [0.0] * 4).outliers()
    assert not results([0.3, 1.0, 0.5, 0.8, 0.4, 0.6, 1.5], [0.0] * 7).outliers()
    assert not results([0.1, 0.1, 0.1, 0.1, 0.1, 0.9], [0.0] * 6).outliers(), "better than the source itself"


def test_a_module_over_its_budget_is_not_reported_twice() -> None:
    assert not results([1.0, 1.0, 1.0, 1.0, 1.0, 3.0], [0.0] * 6).outliers()
