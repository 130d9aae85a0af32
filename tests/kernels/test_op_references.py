"""Each reference Op against the transformers code that it stands for, in float64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from porter.kernels.contract import Case, upcast
from porter.kernels.reference import attention
from porter.kernels.reference.attention import causal_mask
from porter.kernels.reference.linear import int8_product, quantize_per_token
from porter.kernels.registry import default_registry
from porter.precision import float64_mode

BOUND = 1e-12


def cases(name: str, variant: str) -> list[Case]:
    return list(default_registry().op(name, variant).inputs(torch.float64))


def reference(name: str, variant: str, *arguments: Any) -> Any:
    return default_registry().op(name, variant).reference(*arguments)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype == torch.float64
    scale = float(theirs.abs().max()) if theirs.numel() else 1.0
    torch.testing.assert_close(ours, theirs, rtol=BOUND, atol=BOUND * max(1.0, scale))


def with_weight(module: nn.Module, weight: torch.Tensor) -> nn.Module:
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


@pytest.mark.parametrize(
    ("variant", "norm"), [("standard", qwen3.Qwen3RMSNorm), ("zero_centered", qwen3_next.Qwen3NextRMSNorm)]
)
def test_rms_norm(variant: str, norm: Any) -> None:
    for case in cases("rms_norm", variant):
        hidden_states, weight, eps = case.arguments
        with float64_mode():
            theirs = with_weight(norm(hidden_states.shape[-1], eps), weight)(hidden_states)
        assert_same(reference("rms_norm", variant, *case.arguments), theirs)


def test_rms_norm_gated() -> None:
    for case in cases("rms_norm", "gated"):
        hidden_states, weight, gate, eps = case.arguments
        with float64_mode():
            norm = with_weight(qwen3_next.Qwen3NextRMSNormGated(hidden_states.shape[-1], eps), weight)
            theirs = norm(hidden_states, gate)
        assert_same(reference("rms_norm", "gated", *case.arguments), theirs)


@pytest.mark.parametrize("variant", ["standard", "zero_centered"])
def test_add_rms_norm_is_the_sum_and_its_norm(variant: str) -> None:
    for case in cases("add_rms_norm", variant):
        hidden_states, residual, weight, eps = case.arguments
        normed, total = reference("add_rms_norm", variant, *case.arguments)
        assert_same(total, hidden_states + residual)
        assert_same(normed, reference("rms_norm", variant, hidden_states + residual, weight, eps))


def test_rope_half() -> None:
    for case in cases("rope", "half"):
        for ours, theirs in zip(
            reference("rope", "half", *case.arguments), qwen3_next.apply_rotary_pos_emb(*case.arguments), strict=True
        ):
            assert_same(ours, theirs)


def test_rope_interleaved() -> None:
    for case in cases("rope", "interleaved"):
        theirs = deepseek.apply_rotary_pos_emb_interleave(*case.arguments)
        for ours, other in zip(reference("rope", "interleaved", *case.arguments), theirs, strict=True):
            assert_same(ours, other)


def rope_config(head_dim: int, **parameters: Any) -> PretrainedConfig:
    return PretrainedConfig(
        head_dim=head_dim,
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=4096,
        rope_parameters={k: v for k, v in parameters.items() if v is not None},
    )


def assert_frequencies(ours: tuple[torch.Tensor, float], theirs: tuple[torch.Tensor, float]) -> None:
    assert torch.equal(ours[0], theirs[0])
    assert ours[1] == theirs[1]


@pytest.mark.parametrize("exact", [False, True])
def test_rope_frequencies(exact: bool) -> None:
    def same(variant: str, config: PretrainedConfig, arguments: tuple[Any, ...], theirs: Any) -> None:
        if exact:
            with float64_mode():
                assert_frequencies(reference("rope_frequencies", variant, *arguments), theirs(config))
        else:
            assert_frequencies(reference("rope_frequencies", variant, *arguments), theirs(config))

    for case in cases("rope_frequencies", "default"):
        head_dim, theta = case.arguments
        config = rope_config(head_dim, rope_type="default", rope_theta=theta)
        same("default", config, case.arguments, qwen3.Qwen3RotaryEmbedding.compute_default_rope_parameters)
    for case in cases("rope_frequencies", "linear"):
        head_dim, theta, factor = case.arguments
        config = rope_config(head_dim, rope_type="linear", rope_theta=theta, factor=factor)
        same("linear", config, case.arguments, ROPE_INIT_FUNCTIONS["linear"])
    names = ("rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "mscale")
    names += ("mscale_all_dim", "attention_factor")
    for case in cases("rope_frequencies", "yarn"):
        head_dim, *rest = case.arguments
        config = rope_config(head_dim, rope_type="yarn", **dict(zip(names, rest, strict=True)))
        same("yarn", config, case.arguments, ROPE_INIT_FUNCTIONS["yarn"])


def test_swiglu_is_the_gated_mlp_without_its_products() -> None:
    config = SimpleNamespace(hidden_size=7, intermediate_size=7, hidden_act="silu", mlp_bias=False)
    mlp = qwen3.Qwen3MLP(config)
    for case in cases("swiglu", "standard"):
        (gate_up,) = case.arguments
        gate, up = gate_up.chunk(2, dim=-1)
        assert_same(reference("swiglu", "standard", gate_up), mlp.act_fn(gate) * up)


def test_linear_is_torch_linear() -> None:
    for case in cases("linear", "standard"):
        assert_same(reference("linear", "standard", *case.arguments), nn.functional.linear(*case.arguments))


def test_w8a16_is_the_dequantized_product() -> None:
    for case in cases("linear", "w8a16"):
        x, weight, scale, bias = case.arguments
        theirs = nn.functional.linear(x, weight.double() * scale.double()[:, None], bias)
        assert_same(reference("linear", "w8a16", *case.arguments), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_per_token_codes_follow_the_formula_in_float32(dtype: torch.dtype) -> None:
    for case in default_registry().op("linear", "w8a8").inputs(dtype):
        x = case.arguments[0].float()
        codes, scale = quantize_per_token(case.arguments[0])
        assert codes.dtype == torch.int8 and scale.dtype == torch.float32
        for row, row_codes, row_scale in zip(x.flatten(0, -2), codes.flatten(0, -2), scale.flatten(0, -2), strict=True):
            assert float(row_scale) == float(row.abs().max() / 127)
            if float(row_scale) > 0:
                assert row_codes.tolist() == [round(float(value / row_scale)) for value in row]
            else:
                assert not row_codes.any()


def test_int8_product_is_exact_where_float32_sums_are_not() -> None:
    codes = torch.full((2, 5000), 127, dtype=torch.int8)
    codes[1, ::2] = -126
    weight = torch.full((3, 5000), -128, dtype=torch.int8)
    weight[1:, 7] = 1
    exact = codes.to(torch.int64) @ weight.to(torch.int64).T
    assert int(exact.abs().max()) > 2**24
    assert torch.equal(int8_product(codes, weight).to(torch.int64), exact)


def test_w8a8_reconstructs_the_quantized_operands() -> None:
    for case in cases("linear", "w8a8"):
        x, weight, scale, bias = case.arguments
        codes, x_scale = quantize_per_token(x)
        theirs = nn.functional.linear(codes.double() * x_scale, weight.double() * scale.double()[:, None], bias)
        assert_same(reference("linear", "w8a8", *case.arguments), theirs)


def additive(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)


def test_gqa_is_eager_attention() -> None:
    compared = 0
    for case in cases("attention", "gqa"):
        query, key, value, mask, scaling, window = case.arguments
        if mask is None:
            mask = causal_mask(query.shape[2], key.shape[2], window, query.device)
        mask = additive(mask) if mask.dtype == torch.bool else mask
        module = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], training=False)
        with float64_mode():
            theirs, _ = qwen3.eager_attention_forward(module, query, key, value, mask, scaling)
        ours = reference("attention", "gqa", *case.arguments)
        alive = torch.isfinite(theirs)
        assert (ours[~alive] == 0).all()
        assert_same(ours[alive], theirs[alive])
        assert ours.is_contiguous()
        compared += 1
    assert compared > 25


@pytest.mark.parametrize(
    ("name", "variant"), [("attention", "gqa"), ("mla_attention", "absorbed"), ("mla_attention", "expanded")]
)
def test_attention_in_blocks_of_queries_is_the_same(name: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [reference(name, variant, *case.arguments) for case in cases(name, variant)]
    monkeypatch.setattr(attention, "SCORES", 100)
    for case, expected in zip(cases(name, variant), whole, strict=True):
        ours = reference(name, variant, *case.arguments)
        assert ours.is_contiguous()
        assert_same(ours, expected)


@pytest.mark.parametrize(("queries", "keys", "window"), [(1, 1, None), (3, 7, None), (5, 5, 2), (1, 9, 4), (2, 3, 50)])
def test_causal_mask_by_its_definition(queries: int, keys: int, window: int | None) -> None:
    mask = causal_mask(queries, keys, window, torch.device("cpu"))
    for i in range(queries):
        for j in range(keys):
            last = keys - queries + i
            assert bool(mask[i, j]) == (j <= last and (window is None or j > last - window))


@pytest.mark.parametrize("variant", ["absorbed", "expanded"])
def test_mla_is_deepseeks_expansion_and_eager_attention(variant: str) -> None:
    for case in cases("mla_attention", variant):
        query_nope, query_rope, latent, key_rope, weight, mask, scaling = case.arguments
        if not latent.shape[0]:
            continue  # upstream cannot expand an empty batch
        heads, nope = query_nope.shape[1], query_nope.shape[-1]
        linear = nn.Linear(*reversed(weight.shape), bias=False)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        module = SimpleNamespace(
            qk_nope_head_dim=nope,
            v_head_dim=weight.shape[0] // heads - nope,
            qk_rope_head_dim=query_rope.shape[-1],
            kv_b_proj=linear,
            num_key_value_groups=1,
            training=False,
        )
        key, value = deepseek.DeepseekV3Attention.expand_kv(module, latent, key_rope)  # type: ignore[arg-type]
        query = torch.cat((query_nope, query_rope), dim=-1)
        if mask is None:
            mask = causal_mask(query.shape[2], key.shape[2], None, query.device)
        mask = additive(mask) if mask.dtype == torch.bool else mask
        with float64_mode():
            theirs, _ = deepseek.eager_attention_forward(module, query, key, value, mask, scaling)  # type: ignore[arg-type]
        ours = reference("mla_attention", variant, *case.arguments)
        assert ours.is_contiguous()
        alive = torch.isfinite(theirs)
        assert (ours[~alive] == 0).all()
        assert_same(ours[alive], theirs[alive])


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


def op_cases(dtype: torch.dtype) -> list[Any]:
    ops = default_registry().ops.values()
    return [pytest.param(op, dtype, id=f"{op.qualified}-{dtype}") for op in ops if dtype in op.dtypes]


@pytest.mark.parametrize(
    ("op", "dtype"), [*op_cases(torch.float32), *op_cases(torch.bfloat16), *op_cases(torch.float16)]
)
def test_low_precision_references_round_once(op: Any, dtype: torch.dtype) -> None:
    for case in op.inputs(dtype):
        error = op.error(op.reference(*case.arguments), op.oracle(*case.arguments), *case.arguments)
        assert error <= op.tolerance.relative(dtype, *case.arguments), case.label


@pytest.mark.parametrize("op", [pytest.param(op, id=op.qualified) for op in default_registry().ops.values()])
def test_float64_stays_float64_and_inputs_stay_as_they_were(op: Any) -> None:
    for case in op.inputs(op.dtypes[0]):
        arguments = upcast(case.arguments)
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        outputs = op.reference(*arguments)
        if torch.float64 in op.dtypes:
            for output in (outputs,) if isinstance(outputs, torch.Tensor) else outputs:
                assert output.dtype in (torch.float64, torch.int64)
        for argument, copy in zip(arguments, before, strict=True):
            assert not isinstance(argument, torch.Tensor) or torch.equal(argument, copy)
