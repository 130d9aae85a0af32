"""The vendor's RMS norms: documented semantics against float64 formulas, and what the catalogue refuses."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, CHIPS, I310P, VendorRefusal
from porter.kernels.ascend.dry_run import DryVendor
from porter.kernels.ascend.emulator.stand_in import emulated_npu
from porter.kernels.ascend.norm import rms_norm_gated, rms_norm_zero_centered
from porter.kernels.ascend.provider import AscendProvider
from porter.kernels.contract import UNIT_ROUNDOFF, row_error
from porter.kernels.reference.draw import spread, strided
from porter.kernels.registry import default_registry
from porter.kernels.verification import verify

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
PAIRS = ((F16, F32), (BF16, F32), (F16, F16), (BF16, BF16), (F32, F32))
SHAPES = (((1, 1), (1,)), ((3, 7), (7,)), ((2, 5, 131), (131,)), ((2, 3, 4, 8), (4, 8)), ((1, 1031), (1031,)))


def normal(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def formula(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """RmsNorm of the vendor's page in float64, and 1 / Rms(x)."""
    x, gamma = x.double(), gamma.double()
    rows = x.flatten(-gamma.dim())
    rms = (
        ((rows * rows).sum(-1) / rows.shape[-1] + epsilon).sqrt().reshape(*x.shape[: -gamma.dim()], *[1] * gamma.dim())
    )
    return x / rms * gamma, 1 / rms


def bound(dtype: torch.dtype, count: int) -> float:
    """One rounding to `dtype`, and in float32 the sum of `count` squares and a few products."""
    return UNIT_ROUNDOFF[dtype] + (count**0.5 + 4) * UNIT_ROUNDOFF[F32]


@pytest.mark.parametrize("chip", (A2, A3, A5))
@pytest.mark.parametrize("x_dtype, gamma_dtype", PAIRS)
def test_rms_norm_is_the_pages_formula(chip: str, x_dtype: torch.dtype, gamma_dtype: torch.dtype) -> None:
    with emulated_npu(chip):
        for shape, normed in SHAPES:
            x, gamma = normal(*shape, dtype=x_dtype), normal(*normed, dtype=gamma_dtype, seed=1)
            for epsilon in (1e-6, 1e-2):
                y, rstd = sys.modules["torch_npu"].npu_rms_norm(x, gamma, epsilon=epsilon)
                expected, reciprocal = formula(x, gamma, epsilon)
                assert y.dtype == x_dtype and rstd.dtype == F32
                assert row_error(y, expected) <= bound(x_dtype, gamma.numel())
                torch.testing.assert_close(rstd.double(), reciprocal, rtol=bound(F32, gamma.numel()), atol=0)


def test_norms_take_strides_and_extreme_rows() -> None:
    rows = torch.stack((torch.zeros(64), normal(64) * 1e4, normal(64) * 1e-4)).to(BF16)
    with emulated_npu(A2):
        for x in (rows, spread(normal(3, 5, 33, dtype=BF16)), strided(normal(3, 19, dtype=BF16))):
            gamma = normal(x.shape[-1], dtype=BF16)
            y, _ = sys.modules["torch_npu"].npu_rms_norm(x, gamma, epsilon=1e-6)
            assert row_error(y, formula(x, gamma, 1e-6)[0]) <= bound(BF16, gamma.numel())
        empty, rstd = sys.modules["torch_npu"].npu_rms_norm(normal(0, 8), normal(8), epsilon=1e-6)
    assert empty.shape == (0, 8) and rstd.shape == (0, 1)


@pytest.mark.parametrize("dtype", (F16, BF16, F32))
def test_gemma_rms_norm_multiplies_by_one_more_than_gamma(dtype: torch.dtype) -> None:
    with emulated_npu(A2):
        for shape, normed in SHAPES:
            x, gamma = normal(*shape, dtype=dtype), normal(*normed, dtype=dtype, seed=1) * 0.1
            y, rstd = sys.modules["torch_npu"].npu_gemma_rms_norm(x, gamma, epsilon=1e-6)
            expected, _ = formula(x, 1.0 + gamma.double(), 1e-6)
            assert row_error(y, expected) <= bound(dtype, gamma.numel()) and rstd.dtype == F32


@pytest.mark.parametrize("dtype", (F16, BF16, F32))
def test_add_rms_norm_gives_the_norm_of_the_sum_as_stored(dtype: torch.dtype) -> None:
    x1, x2, gamma = (normal(3, 5, 67, dtype=dtype, seed=s) for s in range(3))
    with emulated_npu(A2):
        y, rstd, total = sys.modules["torch_npu"].npu_add_rms_norm(x1, x2, gamma[0, 0], epsilon=1e-5)
    assert torch.equal(total, (x1.double() + x2.double()).to(dtype))
    expected, reciprocal = formula(total, gamma[0, 0], 1e-5)
    assert row_error(y, expected) <= bound(dtype, 67)
    torch.testing.assert_close(rstd.double(), reciprocal, rtol=1e-6, atol=0)


def test_add_rms_norm_leaves_the_root_undefined_on_310p() -> None:
    with emulated_npu(I310P):
        vendor = sys.modules["torch_npu"]
        y, rstd, total = vendor.npu_add_rms_norm(normal(3, 16), normal(3, 16), normal(16), epsilon=1e-6)
    assert bool(rstd.isnan().all()) and bool(y.isfinite().all()) and bool(total.isfinite().all())


X, W = normal(3, 64, dtype=BF16), normal(64, dtype=BF16)
REFUSED: tuple[tuple[str, str, tuple[Any, ...], str], ...] = (
    (A2, "npu_rms_norm", (X, W[:32]), "needs gamma to have the last dimensions of input; input is bfloat16[3, 64]"),
    (A2, "npu_rms_norm", (X, normal(2, 3, 64, dtype=BF16)), "needs gamma to have the last dimensions"),
    (A2, "npu_rms_norm", (W, W), "needs input of 2 or 3"),
    (A2, "npu_rms_norm", (X.half(), W), "needs input / gamma as f16/f32, bf16/f32"),
    (A2, "npu_rms_norm", (X.float(), W), "input is float32[3, 64], gamma is bfloat16[64]"),
    (A2, "npu_rms_norm", (X.double(), W.double()), "needs input / gamma as"),
    (I310P, "npu_rms_norm", (X, W), "needs input / gamma as f16/f16, f32/f32; input is bfloat16[3, 64]"),
    (I310P, "npu_rms_norm", (X.half(), W.float()), "needs input / gamma as f16/f16, f32/f32"),
    (I310P, "npu_rms_norm", (X[:, :8].half(), W[:8].half()), "needs normalised dimensions of input of 32 bytes"),
    (A2, "npu_add_rms_norm", (X, X, W.float()), "needs x1 / x2 / gamma as"),
    (A2, "npu_add_rms_norm", (X, X[:1], W), "needs x1, x2 of one shape"),
    (A2, "npu_add_rms_norm", (X, X, W[:16]), "needs gamma to have the last dimensions of x1"),
    (A2, "npu_add_rms_norm", (X[:0], X[:0], W), "needs no empty x1 or gamma"),
    (I310P, "npu_add_rms_norm", (X, X, W), "needs x1 / x2 / gamma as f16/f16/f16, f32/f32/f32"),
    (A5, "npu_gemma_rms_norm", (X, W), "is not documented for ascend-950 (only ascend-910b, ascend-910c)"),
    (I310P, "npu_gemma_rms_norm", (X.half(), W.half()), "is not documented for ascend-310p"),
    (A2, "npu_gemma_rms_norm", (X, W.float()), "needs input / gamma as f16/f16, bf16/bf16, f32/f32"),
    (A2, "npu_gemma_rms_norm", (normal(64, 3, dtype=BF16).t(), W), "needs input, gamma contiguous"),
    (A2, "npu_gemma_rms_norm", (X[:0], W), "needs no empty input or gamma"),
)


@pytest.mark.parametrize("chip, op, arguments, words", REFUSED)
def test_refuses_with_words(chip: str, op: str, arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(VendorRefusal) as refusal:
        getattr(DryVendor(chip), op)(*arguments, epsilon=1e-6)
    assert str(refusal.value).startswith(f"{op}: ") and words in str(refusal.value)


@pytest.mark.parametrize("op, count", (("npu_rms_norm", 1), ("npu_add_rms_norm", 2), ("npu_gemma_rms_norm", 1)))
def test_epsilon_must_be_passed(op: str, count: int) -> None:
    with pytest.raises(VendorRefusal, match="epsilon is left out; its default 1e-06 is not what models need"):
        getattr(DryVendor(A2), op)(*[X] * count, W)


def test_a_weight_stored_less_one_is_not_given_to_the_plain_norm() -> None:
    x, weight = normal(4, 64, dtype=BF16), 0.1 * normal(64, dtype=BF16, seed=1)
    oracle, _ = formula(x, 1.0 + weight.double(), 1e-6)
    with emulated_npu(A2):
        vendor = sys.modules["torch_npu"]
        assert row_error(rms_norm_zero_centered(vendor, x, weight, 1e-6), oracle) <= bound(BF16, 64)
        assert row_error(rms_norm_zero_centered(vendor, x, weight.float(), 1e-6), oracle) <= bound(BF16, 64)
        assert row_error(vendor.npu_rms_norm(x, weight, epsilon=1e-6)[0], oracle) > 0.5


@pytest.mark.parametrize("name", ("rms_norm", "add_rms_norm"))
def test_zero_centered_norms_on_950_make_the_weight_whole_in_float32(name: str) -> None:
    op = default_registry().op(name, "zero_centered")
    kernel = AscendProvider().implementation(name, "zero_centered", A5)
    assert kernel is not None
    with emulated_npu(A5):
        checks = list(verify(op, kernel, (F32, BF16, F16)))
    assert all(check.passed and not check.refused for check in checks)
    _, calls = AscendProvider().calls(name, "zero_centered", A5, next(iter(op.inputs(BF16))).arguments)
    assert [(call.op.name, call["gamma"].dtype) for call in calls] == [("npu_rms_norm", F32)]


def test_gated_norm_rounds_once() -> None:
    x, weight, gate = normal(2, 3, 64, dtype=BF16), normal(64, dtype=BF16, seed=1), normal(2, 3, 64, dtype=BF16, seed=2)
    oracle = formula(x, weight, 1e-6)[0] * gate.double() / (1 + (-gate.double()).exp())
    with emulated_npu(A2):
        gated = rms_norm_gated(sys.modules["torch_npu"], x, weight, gate, 1e-6)
    assert torch.equal(gated, oracle.to(BF16)) or row_error(gated, oracle) <= 0.6 * UNIT_ROUNDOFF[BF16]


def test_gated_norm_refuses_what_it_would_narrow() -> None:
    x = normal(2, 64).double()
    with pytest.raises(VendorRefusal, match="less than float64 activations are due"):
        rms_norm_gated(DryVendor(A2), x, x[0], x, 1e-6)


def test_every_chip_has_a_norm() -> None:
    for chip in CHIPS:
        DryVendor(chip).npu_rms_norm(X.half(), W.half(), epsilon=1e-6)
