"""What the hypotheses are made of: shared copies, permutations, bits and grids, solving, confidence."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_modules import DEEPSEEK_V3, layer
from torch import nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3

from porter.alignment.hypotheses.attention_scale import yarn_mscale
from porter.alignment.hypotheses.locator import localise
from porter.alignment.hypotheses.low_precision import grid_levels, nearest_levels, round_to, significant_bits
from porter.alignment.hypotheses.permutation import block_of, is_rope_style, matching_order
from porter.alignment.hypotheses.rope_style import turn_half, turn_interleaved
from porter.alignment.hypotheses.routing import gate_of
from porter.alignment.hypotheses.surgery import rebind_forward, set_parameter, shallow_copy
from porter.alignment.hypotheses.trial import confidence, solve

SEEDED = torch.Generator().manual_seed(4)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=SEEDED, dtype=torch.float64)


def test_shallow_copy_shares_tensors_and_nothing_else() -> None:
    source = layer("deepseek_v3")
    copied = shallow_copy(source)
    assert [id(p) for p in copied.parameters()] == [id(p) for p in source.parameters()]
    assert not {id(m) for m in copied.modules()} & {id(m) for m in source.modules()}
    set_parameter(copied, "mlp.gate.weight", torch.zeros(1))
    set_parameter(copied, "mlp.gate.e_score_correction_bias", torch.zeros(2))
    copied.get_submodule("mlp").register_forward_hook(lambda *_: None)
    assert source.get_parameter("mlp.gate.weight").numel() > 1
    assert source.get_buffer("mlp.gate.e_score_correction_bias").numel() > 2
    assert not source.get_submodule("mlp")._forward_hooks


def test_shallow_copy_keeps_tied_modules_tied_and_bound_forwards_bound() -> None:
    block = nn.Sequential(nn.Linear(3, 3), nn.Identity())
    block.add_module("again", block[0])
    rebind_forward(block[0], lambda self, x: (id(self), x))
    copied = shallow_copy(block)
    assert copied.get_submodule("again") is copied.get_submodule("0")
    assert copied.get_submodule("0")(1)[0] == id(copied.get_submodule("0"))


@pytest.mark.parametrize("rows", [2, 7, 64])
@pytest.mark.parametrize("dim", [0, 1])
def test_matching_order_finds_the_permutation(rows: int, dim: int) -> None:
    source = drawn(rows, 5) if dim == 0 else drawn(5, rows)
    order = torch.randperm(rows, generator=SEEDED)
    found = matching_order(source, source.index_select(dim, order), dim)
    if torch.equal(order, torch.arange(rows)):
        assert found is None
    else:
        assert found is not None and torch.equal(found, order)


def test_matching_order_refuses_what_is_no_permutation() -> None:
    source = drawn(8, 5)
    assert matching_order(source, source, 0) is None
    assert matching_order(source, drawn(8, 5), 0) is None
    assert matching_order(source, source[:4], 0) is None
    assert matching_order(source[:1], source[:1], 0) is None


def test_block_of_and_rope_style() -> None:
    assert block_of(torch.arange(12)) == 12
    assert block_of(torch.arange(12).view(3, 4).flip(0).reshape(-1)) == 4
    assert block_of(torch.arange(7).flip(0)) == 1
    pairs = torch.arange(8).view(2, 4).t().reshape(-1)
    assert is_rope_style(torch.cat((pairs, pairs + 8)), 8) and is_rope_style(pairs.argsort(), 8)
    assert not is_rope_style(torch.arange(16), 8) and not is_rope_style(torch.arange(9), 9)


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.float8_e5m2, 3), (torch.float8_e4m3fn, 4), (torch.bfloat16, 8), (torch.float16, 11)]
)
def test_bits_of_storage_formats(dtype: torch.dtype, bits: int) -> None:
    # Within the formats' normal range, where rounding to a number of significant bits is all that a cast does.
    values = drawn(257).sign() * (1 + drawn(257).abs())
    stored = values.to(dtype).double()
    assert significant_bits(stored) == bits
    assert torch.equal(round_to(values, bits), stored)


@given(st.integers(1, 24), st.floats(-1e30, 1e30, allow_subnormal=False))
@settings(max_examples=60, deadline=None)
def test_rounding_errs_at_most_half_a_unit(bits: int, value: float) -> None:
    tensor = torch.tensor([value], dtype=torch.float64)
    rounded = round_to(tensor, bits)
    assert significant_bits(rounded) <= max(bits, 1)
    assert abs(float(rounded - tensor)) <= 2.0**-bits * abs(value)


def test_bits_of_values_that_are_not_finite_or_zero() -> None:
    assert significant_bits(torch.tensor([0.0, float("inf"), float("nan"), 1.5])) == 2
    assert significant_bits(torch.tensor([math.pi], dtype=torch.float64)) > 40


@pytest.mark.parametrize("bits", [2, 3, 5, 8])
def test_grid_is_found_and_rounding_to_it_is_exact(bits: int) -> None:
    weight = drawn(31, 257)
    step = weight.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    quantized = (weight / step).round() * step
    levels = grid_levels(quantized)
    assert levels is not None and 2 ** (bits - 1) < levels <= 2**bits
    # A source on the middle between two levels may go either way; random ones do not lie there.
    assert torch.allclose(nearest_levels(weight, quantized), quantized, rtol=0, atol=1e-12)
    assert grid_levels(weight) is None


@pytest.mark.parametrize("target", [1e-9, 3.7e-4, 0.5, 9.0])
def test_solve_finds_a_minimum_between_grid_points(target: float) -> None:
    grid = [10.0**exponent for exponent in range(-12, 3)]
    value, distance = solve(lambda x: abs(math.log(x / target)), grid)
    assert value == pytest.approx(target, rel=1e-6) and distance < 1e-6


def test_confidence_orders_what_the_numbers_say() -> None:
    assert confidence(0.3, 1e-9, 1e-6) > confidence(0.3, 1e-2, 1e-1) > confidence(0.3, 0.05, 0.01)
    assert confidence(0.3, 0.3, 1e-6) == 0.0 and confidence(0.3, math.inf, 1e-6) == 0.0
    assert confidence(0.3, math.nan, 1e-6) == 0.0
    assert 0.0 <= confidence(math.inf, 0.0, 1e-6) <= 1.0


def test_rotations_are_transformers_own() -> None:
    query, key = drawn(2, 3, 5, 8), drawn(2, 1, 5, 8)
    angles = drawn(2, 5, 4)
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    over_heads = (cos.unsqueeze(1), sin.unsqueeze(1))
    half = deepseek_v3.apply_rotary_pos_emb(query, key, cos, sin)
    pairs = deepseek_v3.apply_rotary_pos_emb_interleave(query, key, cos, sin)
    torch.testing.assert_close(turn_half(query, *over_heads), half[0])
    torch.testing.assert_close(turn_interleaved(key, *over_heads), pairs[1])


def test_gate_reproduces_the_router_of_deepseek_v3() -> None:
    router = layer("deepseek_v3").get_submodule("mlp.gate")
    hidden = drawn(7, DEEPSEEK_V3.hidden_size)
    with torch.no_grad():
        wanted, found = router(hidden), gate_of(router)(router, hidden)
    # Upstream computes in float32 outside float64_mode: 2^-24 on sums of 48 products.
    torch.testing.assert_close(found[0], wanted[0].double(), rtol=1e-5, atol=1e-5)
    dense = [
        torch.zeros(7, 16).double().scatter_(1, indices, weights.double()) for _, weights, indices in (wanted, found)
    ]
    torch.testing.assert_close(dense[1], dense[0], rtol=1e-5, atol=1e-5)


def test_yarn_mscale_is_what_deepseek_v3_applies() -> None:
    attention = layer("deepseek_v3").get_submodule("self_attn")
    mscale = yarn_mscale(DEEPSEEK_V3)
    assert mscale is not None
    assert attention.scaling == pytest.approx(24**-0.5 * mscale**2)
    assert yarn_mscale(layer("qwen3").get_submodule("self_attn").config) is None


def test_localise_names_few_places_and_is_silent_about_many() -> None:
    oracle = drawn(32, 40)
    one = oracle.clone()
    one[5] += 1
    assert any("1 of 32 tokens (5)" in said for said in localise(one, oracle))
    block = oracle.clone()
    block[:, 8:12] += 1
    assert any("4 of 40 channels (8 to 11)" in said for said in localise(block, oracle))
    assert list(localise(oracle + drawn(32, 40), oracle)) == []
    assert list(localise(oracle, oracle)) == []
