"""Weights are judged by what their dtype or scheme must cost, before any forward; the faults are found there."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import bfloat16, deepseek_v3, golden_of, qwen2
from torch import nn

from porter.alignment.align import align
from porter.alignment.quantized_weight import dequantized, grid_of, quantization_error
from porter.alignment.report import WeightRow
from porter.alignment.report_headline import headline
from porter.alignment.weight_judgement import distance, judge
from porter.alignment.weights import WeightPairing
from porter.correspondence import Correspondence

GENERATOR = torch.Generator().manual_seed(5)


class Holder(nn.Module):
    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            setattr(self, name, nn.Parameter(value, requires_grad=False))


def judged(source: torch.Tensor, **candidate: torch.Tensor) -> WeightRow:
    pairing = WeightPairing(Holder(**candidate), Holder(weight=source), Correspondence(), torch.bfloat16, torch.float32)
    (weight,) = pairing
    return judge(weight).row


def blocks(weight: torch.Tensor, side: int, codes: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Round-to-nearest codes of [N, K] with one scale [ceil(N / side), ceil(K / side)] per block."""
    rows, columns = weight.shape
    high, wide = math.ceil(rows / side), math.ceil(columns / side)
    scale = torch.empty(high, wide)
    out = torch.empty(rows, columns)
    most = 127.0 if codes == torch.int8 else torch.finfo(codes).max
    for i in range(high):
        for j in range(wide):
            block = (slice(i * side, (i + 1) * side), slice(j * side, (j + 1) * side))
            scale[i, j] = weight[block].abs().max() / most
            out[block] = weight[block] / scale[i, j]
    return (out.round() if codes == torch.int8 else out).to(codes), scale


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("shape", [(32, 32), (48, 80), (37, 53), (16, 16)])
def test_block_scales(shape: tuple[int, int], codes: torch.dtype) -> None:
    source = torch.randn(shape, generator=GENERATOR) * torch.rand(shape[0], 1, generator=GENERATOR)
    weight, scale = blocks(source, 16, codes)
    assert judged(source, weight=weight, weight_scale_inv=scale).status == "ok"
    dropped = judged(source, weight=weight, weight_scale_inv=torch.ones_like(scale))
    assert dropped.status == "drift" and dropped.error is not None and dropped.error > 1
    if scale.shape[0] != scale.shape[1]:
        row = judged(source, weight=weight, weight_scale_inv=scale.T.contiguous())
        assert row.status == "drift" and "transposed it would" in row.why
    elif scale.numel() > 1:
        assert judged(source, weight=weight, weight_scale_inv=scale.T.contiguous()).status == "drift"


def test_block_scales_are_spread_as_they_were_taken() -> None:
    source = torch.randn(37, 53, generator=GENERATOR)
    weight, scale = blocks(source, 16, torch.int8)
    found = dequantized(weight, scale)
    assert found.values is not None and found.grid == (16, 16)
    exact = torch.stack([torch.stack([weight[i, j] * scale[i // 16, j // 16] for j in range(53)]) for i in range(37)])
    assert torch.equal(found.values, exact)


@pytest.mark.parametrize(
    ("shape", "scale", "grid"),
    [
        ((256, 512), (2, 4), (128, 128)),
        ((256, 512), (256, 4), (1, 128)),
        ((300, 500), (3, 4), (128, 128)),
        ((256, 512), (4, 2), None),
        ((256, 512), (512,), None),
        ((3, 8, 4), (3, 8), (1, 1 << 62)),
    ],
)
def test_grids(shape: tuple[int, ...], scale: tuple[int, ...], grid: tuple[int, int] | None) -> None:
    assert grid_of(torch.empty(shape), torch.empty(scale)) == grid


def test_expected_error_is_that_of_rounding_to_nearest() -> None:
    source = torch.randn(64, 96, generator=GENERATOR)
    for codes in (torch.int8, torch.float8_e4m3fn):
        weight, scale = blocks(source, 32, codes)
        found = dequantized(weight, scale).values
        assert found is not None
        error = float((found - source).norm() / source.norm())
        assert quantization_error(source, (32, 32), codes) == pytest.approx(2 * error, rel=0.05)


def test_codes_without_a_scale_are_not_compared() -> None:
    row = judged(torch.randn(4, 4), weight=torch.randn(4, 4).to(torch.float8_e4m3fn))
    assert row.status == "skipped" and "without a scale" in row.why


@pytest.mark.parametrize("shape", [(), (1,), (7,), (1031, 1031), (3, 5, 7), (0, 4)])
def test_distance_is_the_relative_error_whatever_the_blocks(shape: tuple[int, ...]) -> None:
    a, b = torch.randn(shape, generator=GENERATOR), torch.randn(shape, generator=GENERATOR)
    whole, single = distance(a, b)
    if not b.numel():
        assert (whole, single) == (0.0, 0.0)
        return
    assert whole == pytest.approx(float((a.double() - b.double()).norm() / b.double().norm()), rel=1e-12)
    assert single == pytest.approx(float(((a.double() - b.double()) / b.double()).abs().max()), rel=1e-12)
    assert distance(b, b) == (0.0, 0.0)
    broken = b.clone().flatten()
    broken[0] = math.nan
    assert distance(broken.view(shape), b)[0] == math.inf
    assert distance(a, torch.zeros_like(b))[0] == math.inf


def test_bias_of_a_router_is_judged_by_its_spread(tmp_path: Path) -> None:
    model = deepseek_v3()
    gate = model.model.layers[1].mlp.gate
    gate.e_score_correction_bias.copy_(torch.linspace(5.0, 5.01, 8))
    golden = golden_of(model, tmp_path / "golden")
    candidate = copy.deepcopy(model).to(torch.bfloat16)
    report = align(golden, candidate, passes="weights")
    (row,) = [row for row in report.weights if row.status == "drift"]
    assert row.parameter == "model.layers.1.mlp.gate.e_score_correction_bias"
    assert "1 distinct values where the source has 8" in row.why
    candidate.model.layers[1].mlp.gate.e_score_correction_bias = gate.e_score_correction_bias.clone()
    assert align(golden, candidate, passes="weights").verdict == "aligned"


def test_float16_in_bfloat16_is_said() -> None:
    source = torch.randn(8, 8).half()
    pairing = WeightPairing(
        Holder(weight=source.bfloat16()), Holder(weight=source), Correspondence(), torch.bfloat16, torch.float16
    )
    (row,) = [judge(weight).row for weight in pairing]
    assert row.status == "ok" and "float16 in the source" in row.why


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    model = qwen2()
    return model, golden_of(model, tmp_path_factory.mktemp("dense") / "golden")


def permute(model: Any) -> str:
    """The query rows of one layer are another head's first."""
    weight = model.model.layers[1].self_attn.q_proj.weight
    weight.copy_(weight.roll(12, 0))
    return "model.layers.1.self_attn.q_proj"


def drop_factor(model: Any) -> str:
    """A factor of one norm is lost."""
    model.model.layers[2].input_layernorm.weight.mul_(0.5)
    return "model.layers.2.input_layernorm"


def swap_halves(model: Any) -> str:
    """Two ranks' slices of down_proj (columns) are exchanged."""
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.copy_(torch.cat(weight.chunk(2, 1)[::-1], 1))
    return "model.layers.0.mlp.down_proj"


def wrong_shard(model: Any) -> str:
    """One rank's rows lie in another's place, too."""
    weight = model.model.layers[1].mlp.up_proj.weight
    weight[40:60] = weight[20:40]
    return "model.layers.1.mlp.up_proj"


def whole_layer(model: Any) -> str:
    """All of a layer is of another one."""
    model.model.layers[1].load_state_dict(model.model.layers[2].state_dict())
    return "model.layers.1"


@pytest.mark.parametrize("passes", ["weights", "all"])
@pytest.mark.parametrize("fault", [permute, drop_factor, swap_halves, wrong_shard, whole_layer])
def test_wrong_values_are_found_before_any_forward(dense: Any, fault: Any, passes: str) -> None:
    model, golden = dense
    candidate = bfloat16(model)
    with torch.no_grad():
        module = fault(candidate)
    report = align(golden, candidate, passes=passes)
    assert report.verdict == "drift" and report.first_drift is not None
    assert report.first_drift.module == module
    assert {row.parameter.startswith(module) for row in report.weights if row.status == "drift"} == {True}


def test_a_wrong_parameter_of_a_module_that_nothing_calls_is_named(tmp_path: Path) -> None:
    model = qwen2(layers=2)
    model.model.extra = nn.Linear(3, 2)
    golden, candidate = golden_of(model, tmp_path / "golden", new_tokens=1), copy.deepcopy(model)
    with torch.no_grad():
        candidate.model.extra.weight.mul_(1.5)
    report = align(golden, candidate, source=copy.deepcopy(model), passes="weights")
    assert report.first_drift is not None
    assert (report.first_drift.module, report.first_drift.tensor) == ("model", "extra.weight")
    says = "model.extra.weight differs by 0.5, expected 1.2e-7, in no module that was compared"
    assert headline(report.to_json()) == ("DRIFT", says)
