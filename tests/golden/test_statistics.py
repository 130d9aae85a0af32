"""Statistics against float64 references, for every dtype, and where values are not finite or overflow."""

from __future__ import annotations

import math

import pytest
import torch

from porter.golden.statistics import statistics

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def _values(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 1


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (1,), (7, 13), (64, 1031)])
def test_floats(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = _values(shape).to(dtype)
    stats, exact = statistics(values), values.double()
    # Pairwise float32 sums of 66k terms: a few roundings of the sum of magnitudes.
    tolerance = 1e-14 if dtype == torch.float64 else 8 * 2.0**-24
    assert stats["min"] == float(exact.min()) and stats["max"] == float(exact.max())
    assert stats["mean"] == pytest.approx(float(exact.mean()), abs=tolerance * float(exact.abs().mean()) * 4)
    assert stats["l2"] == pytest.approx(float(exact.norm()), rel=tolerance * 4)
    assert (stats["nan"], stats["inf"]) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool])
def test_integers(dtype: torch.dtype) -> None:
    values = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    assert statistics(values) == {"min": 0, "max": 1, "mean": 4 / 6, "l2": 2.0, "nan": 0, "inf": 0}


def test_complex_counts_both_parts() -> None:
    assert statistics(torch.tensor([3 + 4j]))["l2"] == 5.0
    assert statistics(torch.tensor([3 + 4j]).conj())["min"] == -4.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_not_finite_elements_are_counted_and_left_out(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, math.nan, -2.0, math.inf, -math.inf, math.nan], dtype=dtype)
    expected = {"min": -2.0, "max": 1.0, "mean": -0.5, "l2": pytest.approx(math.sqrt(5)), "nan": 2, "inf": 2}
    assert statistics(values) == expected


def test_nothing_finite_and_nothing_at_all() -> None:
    assert statistics(torch.full((3,), math.nan))["min"] is None
    assert statistics(torch.empty(0, 5)) == {"min": None, "max": None, "mean": None, "l2": 0.0, "nan": 0, "inf": 0}


def test_norm_beyond_the_dtype() -> None:
    assert statistics(torch.full((4,), 1e30))["l2"] == pytest.approx(2e30, rel=1e-6)
    assert statistics(torch.full((4,), 1e300, dtype=torch.float64))["l2"] == pytest.approx(2e300)
    assert statistics(torch.full((4,), 60000.0, dtype=torch.float16))["l2"] == pytest.approx(120000.0, rel=1e-3)
    assert statistics(torch.full((3,), 2e38))["mean"] == pytest.approx(2e38, rel=1e-6)


def test_strides_do_not_matter() -> None:
    values = _values((9, 31)).float()
    contiguous, strided = statistics(values.T.contiguous()), statistics(values.T)
    assert strided == pytest.approx(contiguous, rel=1e-5)
