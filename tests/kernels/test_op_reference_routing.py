"""The router, experts and sampling references against transformers and their definitions, in float64."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from reference_cases import assert_same, cases, reference, with_weight
from torch import nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

from porter.precision import float64_mode


def test_softmax_router() -> None:
    for case in cases("router", "softmax"):
        hidden, weight, top_k, renormalize = case.arguments
        experts, size = weight.shape
        config = Qwen3MoeConfig(
            num_experts=experts, hidden_size=size, num_experts_per_tok=top_k, norm_topk_prob=renormalize
        )
        router = with_weight(qwen3_moe.Qwen3MoeTopKRouter(config), weight)
        with float64_mode():
            logits, weights, indices = router(hidden)
        ours = reference("router", "softmax", *case.arguments)
        assert_same(ours[0], logits)
        assert_same(ours[1], weights)
        assert torch.equal(ours[2], indices) or "zeros" in case.label


def test_grouped_sigmoid_router() -> None:
    for case in cases("router", "grouped_sigmoid"):
        hidden, weight, bias, top_k, groups, kept, renormalize, factor = case.arguments
        config = SimpleNamespace(
            num_experts_per_tok=top_k,
            num_local_experts=weight.shape[0],
            hidden_size=weight.shape[1],
            routed_scaling_factor=factor,
            n_group=groups,
            topk_group=kept,
            norm_topk_prob=renormalize,
        )
        router = with_weight(deepseek.DeepseekV3TopkRouter(config), weight)
        router.e_score_correction_bias = bias
        with float64_mode():
            logits, weights, indices = router(hidden)
        ours = reference("router", "grouped_sigmoid", *case.arguments)
        assert_same(ours[0], logits)
        # Upstream leaves the chosen experts in no particular order.
        (our_order, our_place), (order, place) = ours[2].sort(dim=-1), indices.sort(dim=-1)
        assert torch.equal(our_order, order)
        assert_same(ours[1].gather(1, our_place), weights.gather(1, place))


def test_experts() -> None:
    for case in cases("experts", "standard"):
        hidden, index, weights, gate_up, down = case.arguments
        experts, _, size = gate_up.shape
        config = DeepseekV3Config(
            n_routed_experts=experts, hidden_size=size, moe_intermediate_size=down.shape[-1], hidden_act="silu"
        )
        config._experts_implementation = "eager"
        module = deepseek.DeepseekV3Experts(config)
        module.gate_up_proj, module.down_proj = (nn.Parameter(w, requires_grad=False) for w in (gate_up, down))
        assert_same(reference("experts", "standard", *case.arguments), module(hidden, index, weights))


def test_experts_w8a16_is_the_dequantized_mixture() -> None:
    for case in cases("experts", "w8a16"):
        *routed, gate_up, gate_up_scale, down, down_scale = case.arguments
        dequantized = (
            gate_up.double() * gate_up_scale.double()[..., None],
            down.double() * down_scale.double()[..., None],
        )
        ours = reference("experts", "w8a16", *case.arguments)
        assert_same(ours, reference("experts", "standard", *routed, *dequantized))


def test_experts_w8a8_is_the_sum_of_w8a8_layers() -> None:
    for case in cases("experts", "w8a8"):
        hidden, index, weights, gate_up, gate_up_scale, down, down_scale = case.arguments
        expected = torch.zeros_like(hidden)
        for token in range(hidden.shape[0]):
            for expert, share in zip(index[token].tolist(), weights[token], strict=True):
                if expert < gate_up.shape[0]:
                    first = reference("linear", "w8a8", hidden[token], gate_up[expert], gate_up_scale[expert], None)
                    gated = reference("swiglu", "standard", first)
                    second = reference("linear", "w8a8", gated, down[expert], down_scale[expert], None)
                    expected[token] += share * second
        assert_same(reference("experts", "w8a8", *case.arguments), expected)


def test_greedy_takes_the_first_of_the_largest() -> None:
    for case in cases("sampling", "greedy"):
        (logits,) = case.arguments
        ids = reference("sampling", "greedy", logits)
        assert ids.tolist() == [row.index(max(row)) for row in logits.tolist()]


def sample_by_definition(row: list[float], temperature: float, top_k: int, top_p: float, uniform: float) -> int:
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[: top_k or None]
    largest = max(row)
    weights = [math.exp((row[i] - largest) / temperature) for i in order]
    probabilities, kept, reached = [w / sum(weights) for w in weights], [], 0.0
    for i, probability in zip(order, probabilities, strict=True):
        if kept and reached >= top_p:
            break
        kept.append((i, probability))
        reached += probability
    running, total = 0.0, sum(p for _, p in kept)
    for i, probability in kept:
        running += probability / total
        if running > uniform:
            return i
    return kept[-1][0]


def test_top_k_top_p_by_its_definition() -> None:
    for case in cases("sampling", "top_k_top_p"):
        logits, temperature, top_k, top_p, uniform = case.arguments
        expected = [
            sample_by_definition(row, temperature, top_k, top_p, u)
            for row, u in zip(logits.tolist(), uniform.tolist(), strict=True)
        ]
        assert reference("sampling", "top_k_top_p", *case.arguments).tolist() == expected, case.label


def test_top_k_top_p_refuses_a_temperature_of_zero() -> None:
    with pytest.raises(ValueError, match="temperature must be above 0"):
        reference("sampling", "top_k_top_p", torch.zeros(1, 3), 0.0, 0, 1.0, torch.zeros(1))
