"""Experts under rounding: legitimate bf16 ports of models that route, flips told apart, gates that are too coarse."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import bfloat16, deepseek_v3, golden_of, randomise
from torch import nn

from porter.alignment.align import align
from porter.alignment.budget import judged_native, measured
from porter.alignment.observation import distance
from porter.alignment.roundings import other_roundings
from porter.alignment.routing import Choice

GATE = "model.layers.3.mlp.gate"


def qwen3_moe(layers: int = 12) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=8,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    return randomise(Qwen3MoeForCausalLM(config))


def test_legitimate_port_of_twelve_layers_of_64_experts_is_aligned(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = qwen3_moe()
    golden = golden_of(model, tmp_path / "golden", new_tokens=1)
    report = align(golden, bfloat16(model))
    assert report.verdict == "aligned", report.first_drift
    assert report.routing is not None and report.routing.flips == report.routing.benign > 0
    recorded = align(golden, golden_of(bfloat16(model), tmp_path / "other", new_tokens=1))
    assert recorded.verdict == "aligned", recorded.first_drift
    errors = [row.end_to_end for row in recorded.modules if row.module.endswith(".mlp") and row.step == 0]
    assert max(error for error in errors if error is not None) < 0.1, "flipped tokens are not compared"


@pytest.mark.parametrize("live", [True, False], ids=["model", "recording"])
def test_one_gate_in_bfloat16_is_a_drift(tmp_path: Path, live: bool) -> None:
    torch.set_num_threads(1)
    model = deepseek_v3(layers=5)
    golden = golden_of(model, tmp_path / "golden", new_tokens=2)

    def candidate(narrow: bool) -> Any:
        port = bfloat16(model)
        gate = port.get_submodule(GATE)
        forward = gate.forward

        def narrowed(hidden_states: torch.Tensor) -> Any:
            logits, weights, experts = forward(hidden_states)
            return logits.to(torch.bfloat16).to(logits.dtype), weights, experts

        if narrow:
            gate.forward = narrowed
        return port if live else golden_of(port, tmp_path / f"recorded-{narrow}", new_tokens=2)

    right, wrong = (align(golden, candidate(narrow), passes="replay") for narrow in (False, True))
    assert right.verdict == "aligned", right.first_drift
    assert wrong.first_drift is not None and wrong.first_drift.module == GATE
    assert {row.module for row in wrong.modules if row.status == "drift"} == {GATE}


def test_weights_of_a_recording_may_be_wider_or_tables_narrower(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = deepseek_v3(layers=3)
    golden = golden_of(model, tmp_path / "golden", new_tokens=2)
    wide = bfloat16(model)
    for name, module in wide.named_modules():
        if name.endswith("gate"):
            module.weight.data = model.get_parameter(f"{name}.weight").data.clone()
            module.e_score_correction_bias.data = model.get_buffer(f"{name}.e_score_correction_bias").clone()
    report = align(golden, golden_of(wide, tmp_path / "wide", new_tokens=2))
    assert report.verdict == "aligned", report.first_drift
    assert any("as wide as the golden's" in row.why for row in report.modules if row.module.endswith("gate"))
    coarse = copy.deepcopy(wide)
    coarse.model.layers[2].mlp.gate.weight.data *= 1.004
    report = align(golden, golden_of(coarse, tmp_path / "coarse", new_tokens=2))
    assert report.first_drift is not None and report.first_drift.module == "model.layers.2.mlp.gate"


def test_flipped_tokens_of_two_choices() -> None:
    one = Choice(torch.tensor([[0, 1], [2, 3], [1, 0]]), 4, None)
    other = Choice(torch.tensor([[1, 0], [2, 4], [1, 2]]), 5, None)
    flipped = one.flipped(other)
    assert flipped is not None and flipped.tolist() == [False, True, True]
    assert one.flipped(Choice(torch.tensor([[0, 1]]), 4, None)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("features", [2, 7, 64])
def test_other_roundings_are_the_same_mathematics(dtype: torch.dtype, features: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(features, 5).to(dtype)
    x = torch.randn(3, 4, features, dtype=dtype)
    exact = x.double() @ linear.weight.double().T + linear.bias.double()
    rounding = torch.finfo(dtype).eps
    with torch.no_grad():
        for way in other_roundings():
            with way:
                found, product = linear(x), x @ linear.weight.mT
            assert found.dtype == product.dtype == dtype
            assert distance(found, exact).error < 2 * rounding
            assert distance(product, exact - linear.bias.double()).error < 2 * rounding


def test_the_largest_noise_counts_and_what_was_not_measured_is_the_dtypes() -> None:
    exact = {"output": torch.randn(1000, dtype=torch.float64), "alone": torch.ones(3, dtype=torch.float64)}
    ways = [{"output": (exact["output"] * (1 + error)).float()} for error in (1e-3, 3e-3)]
    noise = measured(exact, ways)
    assert noise["output"].error == pytest.approx(3e-3, rel=1e-3)
    candidate = {"output": (exact["output"] * 1.005).float(), "alone": torch.full((3,), 1.0 + 1e-5)}
    verdicts = judged_native(candidate, exact, noise, 2.0, 0.0)
    assert [(v.label, v.over) for v in verdicts] == [("alone", True), ("output", False)]
    assert verdicts[1].gain == pytest.approx(5e-3, rel=1e-3)
    assert (verdicts[0].floor, verdicts[1].budget) == (0.0, pytest.approx(6e-3, rel=1e-3))
