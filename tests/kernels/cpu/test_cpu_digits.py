"""int8 weights times bfloat16 rows: exact wherever the row fits its digits, within tolerance elsewhere."""

from __future__ import annotations

import pytest
import torch

from porter.kernels.cpu.build import cpu_features
from porter.kernels.cpu.library import KernelLibrary
from porter.kernels.cpu.linear import linear_w8a16
from porter.kernels.registry import default_registry

LIBRARY = KernelLibrary()
exact_only = pytest.mark.skipif(
    LIBRARY.load() is not None or LIBRARY.isa != "avx512" or "avx512_vnni" not in cpu_features(),
    reason="the exact product needs AVX-512 VNNI",
)


def drawn(rows: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 7919 + n * 31 + k)
    x = torch.randn(rows, k, generator=generator).bfloat16()
    weight = torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8)
    return x, weight, torch.rand(n, generator=generator) + 0.01


def once_rounded(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The exact sum, rounded to float32 once, times the scale, rounded to bfloat16. float64 holds the sums exactly:
    30 bits of x, 8 of the weight and 17 of the length are more than its 53 only where x uses all 30."""
    return ((x.double() @ weight.double().T).float() * scale).bfloat16()


@exact_only
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("n, k", [(1, 1), (3, 7), (33, 63), (31, 64), (40, 65), (37, 129), (65, 576), (17, 1537)])
def test_rows_of_ordinary_range_are_exact(rows: int, n: int, k: int) -> None:
    x, weight, scale = drawn(rows, n, k)
    assert torch.equal(linear_w8a16(LIBRARY)(x, weight, scale, None), once_rounded(x, weight, scale))


@exact_only
@pytest.mark.parametrize("factor", [2.0**-100, 2.0**-20, 1.0, 2.0**60])
@pytest.mark.parametrize("range_bits", [0, 10, 20])
def test_every_scale_and_number_of_digits(factor: float, range_bits: int) -> None:
    x, weight, scale = drawn(1, 33, 577)
    x = torch.sign(x) * factor
    x[0, ::3] *= 2.0**range_bits
    assert torch.equal(linear_w8a16(LIBRARY)(x, weight, scale, None), once_rounded(x, weight, scale))


@exact_only
def test_a_row_of_zeros_and_extreme_weights() -> None:
    _, weight, scale = drawn(1, 5, 200)
    x = torch.zeros(1, 200, dtype=torch.bfloat16)
    assert torch.equal(linear_w8a16(LIBRARY)(x, weight, scale, None), torch.zeros(1, 5, dtype=torch.bfloat16))
    x.fill_(-255.0)
    weight = torch.full((5, 200), -128, dtype=torch.int8)
    assert torch.equal(linear_w8a16(LIBRARY)(x, weight, scale, None), once_rounded(x, weight, scale))


@pytest.mark.skipif(LIBRARY.load() is not None, reason="no compiler")
@pytest.mark.parametrize("outlier", [1e30, 2.0**31, float("inf"), float("nan")])
@pytest.mark.parametrize("at", [0, 5, 76])
def test_rows_of_wide_range_and_of_no_number(outlier: float, at: int) -> None:
    x, weight, scale = drawn(2, 33, 77)
    x[1, at] = outlier
    weight[3, at] = 0
    op = default_registry().op("linear", "w8a16")
    result, arguments = linear_w8a16(LIBRARY)(x, weight, scale, None), (x, weight, scale, None)
    assert op.error(result, op.oracle(*arguments), *arguments) <= op.tolerance.relative(torch.bfloat16, *arguments)


@exact_only
def test_a_row_that_hides_small_values_behind_a_zero_weight() -> None:
    x, weight, scale = drawn(1, 4, 64)
    x[0, 0], weight[:, 0] = 1e20, 0
    small = once_rounded(x[:, 1:], weight[:, 1:], scale)
    result = linear_w8a16(LIBRARY)(x, weight, scale, None)
    assert ((result - small).abs() <= small.abs() * 2.0**-7).all()
