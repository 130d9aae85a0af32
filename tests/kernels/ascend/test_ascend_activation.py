"""The vendor's gated activations: documented semantics against float64 formulas, and what is refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from porter.kernels.ascend.activation import swiglu_clamped
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, I310P, VendorRefusal
from porter.kernels.ascend.dry_run import DryVendor
from porter.kernels.ascend.emulator.stand_in import emulated_npu
from porter.kernels.contract import UNIT_ROUNDOFF, row_error

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))).to(dtype)


def bound(dtype: torch.dtype) -> float:
    return UNIT_ROUNDOFF[dtype] + 8 * UNIT_ROUNDOFF[F32]


def clipped(a: torch.Tensor, b: torch.Tensor, alpha: float, limit: float, bias: float) -> torch.Tensor:
    """The page's formula in float64."""
    a = torch.minimum(a.double(), torch.tensor(limit))
    b = torch.maximum(torch.minimum(b.double(), torch.tensor(limit)), torch.tensor(-limit))
    return a / (1 + (-alpha * a).exp()) * (b + bias)


@pytest.mark.parametrize("dtype", (F16, BF16, F32))
@pytest.mark.parametrize("chip", (A2, A3, A5))
def test_swiglu_takes_the_gate_first_along_any_dimension(chip: str, dtype: torch.dtype) -> None:
    with emulated_npu(chip):
        for shape, dim in (((2,), -1), ((3, 14), -1), ((2, 6, 5), 1), ((4, 3), -2), ((1, 1, 1, 1, 1, 1, 1, 2062), 7)):
            x = normal(*shape, dtype=dtype)
            y = sys.modules["torch_npu"].npu_swiglu(x, dim=dim)
            half = shape[dim] // 2
            gate, up = x.double().narrow(dim, 0, half), x.double().narrow(dim, half, half)
            assert y.dtype == dtype and row_error(y, gate / (1 + (-gate).exp()) * up) <= bound(dtype)


def test_swiglu_of_extreme_gates_is_finite() -> None:
    x = torch.tensor([[200.0, -200.0, 1.0, 1.0], [1e4, -1e4, 1e-4, 0.0]], dtype=BF16)
    with emulated_npu(A2):
        y = sys.modules["torch_npu"].npu_swiglu(x, dim=-1)
    assert torch.equal(y[:, 1], torch.zeros(2, dtype=BF16)) and y[0, 0] == 200.0


@pytest.mark.parametrize("dtype", (F16, BF16, F32))
@pytest.mark.parametrize("interleaved", (False, True))
def test_clipped_swiglu_is_the_pages_formula(dtype: torch.dtype, interleaved: bool) -> None:
    with emulated_npu(A2):
        for shape in ((1, 2), (3, 14), (2, 3, 38)):
            x, numbers = normal(*shape, dtype=dtype), {"alpha": 1.7, "limit": 2.0, "bias": 0.5}
            y = sys.modules["torch_npu"].npu_clipped_swiglu(x, dim=-1, interleaved=interleaved, **numbers)
            a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
            # bias + b may cancel, so the error is that of the terms.
            expected = clipped(a, b, **numbers)
            assert y.dtype == dtype and row_error(y, expected) <= 4 * bound(dtype)


def test_clipped_swiglu_cuts_rows_past_the_dimension_as_one() -> None:
    x = normal(2, 6, 5, dtype=F32)
    with emulated_npu(A2):
        vendor = sys.modules["torch_npu"]
        halves = vendor.npu_clipped_swiglu(x, dim=1, alpha=1.0, limit=2.0, bias=0.0, interleaved=False)
        pairs = vendor.npu_clipped_swiglu(x, dim=1, alpha=1.0, limit=2.0, bias=0.0, interleaved=True)
    torch.testing.assert_close(halves.double(), clipped(x[:, :3], x[:, 3:], 1.0, 2.0, 0.0), rtol=1e-5, atol=1e-6)
    flat = x.reshape(2, 30)
    expected = clipped(flat[:, 0::2], flat[:, 1::2], 1.0, 2.0, 0.0).reshape(2, 3, 5)
    torch.testing.assert_close(pairs.double(), expected, rtol=1e-5, atol=1e-6)


def test_clipped_swiglu_leaves_rows_past_its_groups_undefined() -> None:
    x, numbers = normal(7, 8), {"alpha": 1.0, "limit": 2.0, "bias": 0.0, "interleaved": False}
    with emulated_npu(A2):
        vendor = sys.modules["torch_npu"]
        y = vendor.npu_clipped_swiglu(x, group_index=torch.tensor([2, 0, 3]), **numbers)
        assert bool(y[:5].isfinite().all()) and bool(y[5:].isnan().all())
        with pytest.raises(VendorRefusal, match="do not add up to more rows than x has"):
            vendor.npu_clipped_swiglu(x, group_index=torch.tensor([2, 6]), **numbers)
        with pytest.raises(VendorRefusal, match="counts in group_index that are not negative"):
            vendor.npu_clipped_swiglu(x, group_index=torch.tensor([2, -1]), **numbers)


def test_the_defaults_are_another_models() -> None:
    """Leaving out any number is refused, and GPT-OSS's numbers give something else than DeepSeek-V4 computes."""
    x = normal(5, 64)
    gate, up = x.chunk(2, dim=-1)
    oracle = clipped(gate, up, 1.0, 10.0, 0.0)
    theirs = {"alpha": 1.702, "limit": 7.0, "bias": 1.0, "interleaved": True}
    with emulated_npu(A2):
        vendor = sys.modules["torch_npu"]
        assert row_error(swiglu_clamped(vendor, x, 10.0), oracle) <= bound(BF16)
        assert row_error(vendor.npu_clipped_swiglu(x, **theirs), oracle) > 0.1
        for name in theirs:
            with pytest.raises(VendorRefusal, match=f"{name} is left out; its default"):
                vendor.npu_clipped_swiglu(x, **{n: v for n, v in theirs.items() if n != name})


CLIP = {"alpha": 1.0, "limit": 1.0, "bias": 0.0, "interleaved": False}
REFUSED: tuple[tuple[str, str, torch.Tensor, dict[str, Any], str], ...] = (
    (A2, "npu_swiglu", normal(3, 7), {}, "needs dimension dim of input even; input is bfloat16[3, 7], dim is -1"),
    (A2, "npu_swiglu", normal(3, 8), {"dim": 2}, "needs dim to be a dimension of input"),
    (A2, "npu_swiglu", normal(3, 8), {"dim": 0}, "needs dimension dim of input even"),
    (A2, "npu_swiglu", normal(8, 4).t(), {}, "needs input contiguous; input is bfloat16[4, 8] not contiguous"),
    (A2, "npu_swiglu", normal(0, 8), {}, "needs no empty input"),
    (A2, "npu_swiglu", normal(3, 8).double(), {}, "needs input as f16, bf16, f32"),
    (A2, "npu_swiglu", normal(*[1] * 8, 2), {}, "needs input of 1 or 2 or"),
    (I310P, "npu_swiglu", normal(3, 64), {}, "needs input as f16, f32; input is bfloat16[3, 64]"),
    (I310P, "npu_swiglu", normal(3, 48).half(), {}, "needs dimension -1 of input a multiple of 32"),
    (A2, "npu_clipped_swiglu", normal(3, 7), CLIP, "needs dimension dim of x even"),
    (A2, "npu_clipped_swiglu", normal(8), CLIP, "needs x of 2 or 3"),
    (A2, "npu_clipped_swiglu", normal(8, 4).t(), CLIP, "needs x contiguous"),
    (A2, "npu_clipped_swiglu", normal(3, 8), {**CLIP, "dim": -3}, "needs dim to be a dimension of x"),
    (A2, "npu_clipped_swiglu", normal(3, 8), {**CLIP, "group_index": torch.ones(2)}, "needs group_index as i64"),
    (A5, "npu_clipped_swiglu", normal(3, 8), CLIP, "is not documented for ascend-950"),
    (I310P, "npu_clipped_swiglu", normal(3, 8).half(), CLIP, "is not documented for ascend-310p"),
)


@pytest.mark.parametrize("chip, op, x, keywords, words", REFUSED)
def test_refuses_with_words(chip: str, op: str, x: torch.Tensor, keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(VendorRefusal) as refusal:
        getattr(DryVendor(chip), op)(x, **keywords)
    assert str(refusal.value).startswith(f"{op}: ") and words in str(refusal.value)
