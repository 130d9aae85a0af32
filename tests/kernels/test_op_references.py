"""Each reference Op against the transformers code that it stands for, in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference_cases import assert_same, cases, reference, with_weight
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from porter.kernels.contract import upcast
from porter.kernels.reference.linear import int8_product, quantize_per_token
from porter.kernels.registry import default_registry
from porter.precision import float64_mode


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
                assert output.dtype in (torch.float64, torch.int64, torch.int32)
        for argument, copy in zip(arguments, before, strict=True):
            assert not isinstance(argument, torch.Tensor) or torch.equal(argument, copy)
