"""Quantization fused with norms and gated activations, by the vendor's pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from porter.kernels.ascend.catalogue.vendor_op import VendorRefusal

F16, BF16 = torch.float16, torch.bfloat16


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def near(codes: torch.Tensor, scale: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether codes times their row's scale are the nearest to `exact`, float32 rounding of it aside."""
    return bool(((codes.double() * scale.double()[:, None] - exact).abs() <= scale.double()[:, None] * 0.51).all())


@pytest.mark.parametrize("left", [True, False])
def test_gated_rows_of_groups_are_scaled_activated_and_quantized(npu: Any, left: bool) -> None:
    x = torch.randint(-9000, 9000, (6, 128), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    weight, token, counts = (
        drawn(3, 128, seed=2).abs() * 1e-2,
        drawn(6, 1, seed=4).abs() * 1e-2,
        torch.tensor([2, 0, 3]),
    )
    codes, scale = npu.npu_dequant_swiglu_quant(
        x, weight_scale=weight, activation_scale=token, group_index=counts, activate_left=left, quant_mode=1
    )
    wide = x[:5].double() * weight.double()[[0, 0, 2, 2, 2]] * token.double()[:5]
    first, second = wide.chunk(2, -1)
    exact = silu(first) * second if left else silu(second) * first
    assert near(codes[:5], scale[:5], exact)
    assert bool((codes[5] == 0x7F).all()) and bool(scale[5].isnan()), "rows past the groups are not written"


def test_the_other_half_is_activated_by_default_so_the_choice_is_always_passed(npu: Any) -> None:
    with pytest.raises(VendorRefusal, match="activate_left is left out; its default False"):
        npu.npu_dequant_swiglu_quant(drawn(2, 8, dtype=BF16), quant_mode=1)
    with pytest.raises(VendorRefusal, match="quant_mode is left out"):
        npu.npu_dequant_swiglu_quant(drawn(2, 8, dtype=BF16), activate_left=True)


def test_clamped_activation_needs_its_constants(npu: Any) -> None:
    x = drawn(3, 10, dtype=BF16) * 4
    given = {"activate_left": True, "quant_mode": 1, "swiglu_mode": 2}
    with pytest.raises(VendorRefusal, match="clamp_limit, glu_alpha and glu_bias passed"):
        npu.npu_dequant_swiglu_quant(x, **given)
    codes, scale = npu.npu_dequant_swiglu_quant(x, **given, clamp_limit=2.0, glu_alpha=1.0, glu_bias=0.0)
    gate, up = x.double().chunk(2, -1)
    assert near(codes, scale, silu(gate.clamp(max=2)) * up.clamp(-2, 2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.ones(2, 9, dtype=BF16)}, "even"),
        ({"x": torch.ones(2, 8, dtype=torch.int32)}, "activation_scale .* for int32 x"),
        ({"activation_scale": torch.ones(2, 1)}, "x / weight_scale / activation_scale as"),
        ({"group_index": torch.tensor([1, 1])}, "a multiple of 64 with group_index"),
        ({"group_index": torch.tensor([1], dtype=torch.int32)}, "group_index as i64"),
        ({"weight_scale": torch.ones(2, 8)}, r"weight_scale \[groups, 2H\]"),
        ({"quant_mode": 0}, "quant_mode to be one of 1"),
        ({"x": torch.ones(2, 2, 4, dtype=BF16)}, "x of 2 dimensions"),
    ],
)
def test_dequant_swiglu_quant_refuses(npu: Any, change: dict[str, Any], words: str) -> None:
    given = {"x": torch.ones(2, 8, dtype=BF16), "activate_left": True, "quant_mode": 1} | change
    with pytest.raises(VendorRefusal, match=words):
        npu.npu_dequant_swiglu_quant(**given)


def test_counts_may_not_pass_the_tokens(npu: Any) -> None:
    x = torch.ones(3, 128, dtype=BF16)
    with pytest.raises(VendorRefusal, match="counts that sum to the tokens of x at most"):
        npu.npu_dequant_swiglu_quant(x, group_index=torch.tensor([1, 3, 4]), activate_left=True, quant_mode=1)


def normed(x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    total = (x1 + x2).double()
    return total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gamma.double()


def test_norm_with_given_scales(npu: Any) -> None:
    x1, x2, gamma = drawn(3, 40, dtype=F16), drawn(3, 40, dtype=F16, seed=5), drawn(40, dtype=F16, seed=6)
    scales, points = torch.full((40,), 0.02), torch.full((40,), 7, dtype=torch.int32)
    first, second, total = npu.npu_add_rms_norm_quant(x1, x2, gamma, scales, points, epsilon=1e-6, div_mode=True)
    wanted = (normed(x1, x2, gamma) / 0.02 + 7).clamp(-128, 127)
    assert ((first.double() - wanted).abs() <= 0.51).all() and torch.equal(total, x1 + x2)
    assert bool((second == 0x7F).all()), "the second result is not defined without scales2"
    with pytest.raises(VendorRefusal, match="of its shape"):
        npu.npu_add_rms_norm_quant(x1, x2, gamma, torch.ones(1), None, epsilon=1e-6, div_mode=True)
    with pytest.raises(VendorRefusal, match="div_mode is left out"):
        npu.npu_add_rms_norm_quant(x1, x2, gamma, scales, points, epsilon=1e-6)
    with pytest.raises(VendorRefusal, match="x1 / x2 / gamma / scales1"):
        npu.npu_add_rms_norm_quant(x1, x2, gamma, scales.to(BF16), points, epsilon=1e-6, div_mode=True)


def test_norm_with_scales_of_tokens(npu: Any) -> None:
    x1, x2, gamma = drawn(3, 33, dtype=BF16), drawn(3, 33, dtype=BF16, seed=5), drawn(33, dtype=BF16, seed=6)
    first, second, total, scale, none = npu.npu_add_rms_norm_dynamic_quant(
        x1, x2, gamma, epsilon=1e-6, output_mask=[True, False]
    )
    assert near(first, scale, normed(x1, x2, gamma)) and torch.equal(total, x1 + x2)
    assert second.numel() == none.numel() == 0
    for mask, words in (([False, False], "to keep a result"), (None, "which of the two results")):
        with pytest.raises(VendorRefusal, match=words):
            npu.npu_add_rms_norm_dynamic_quant(x1, x2, gamma, epsilon=1e-6, output_mask=mask)
