"""The kernels against torch: moments and bucket sums, for every dtype, length and instruction set."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

from porter.golden.digest import fingerprint_by_numpy
from porter.golden.one_pass import one_pass
from porter.golden.signs import TILE
from porter.golden.sketch import project, project_by_torch
from porter.golden.statistics import statistics, statistics_by_torch
from porter.kernels.cpu.build import available_isas
from porter.kernels.cpu.library import KernelLibrary

NUMELS = [1, 15, 127, 1025, TILE - 1, TILE, TILE + 1, 3 * TILE + 511]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
          torch.bool]  # fmt: skip


@cache
def _library(isa: str) -> KernelLibrary:
    return KernelLibrary(isa)


@pytest.fixture(params=available_isas())
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> KernelLibrary:
    library = _library(request.param)
    if library.load() is not None:
        pytest.skip(str(library.reason))
    monkeypatch.setattr("porter.golden.one_pass.kernels", lambda: library)
    return library


def _values(numel: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (torch.randn(numel, generator=torch.Generator().manual_seed(numel), dtype=torch.float64) * 3 + 1).to(dtype)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", NUMELS)
def test_moments(dtype: torch.dtype, numel: int) -> None:
    values = _values(numel, dtype)
    measured, exact = one_pass(values), values.double()
    assert measured is not None and measured.words == fingerprint_by_numpy(values)
    # Lanes of at most 128 float32 additions, then float64: a few roundings of the sum of magnitudes.
    tolerance = 128 * 2.0**-24 if dtype in (torch.float32, torch.bfloat16) else 1e-13
    moments = measured.moments
    assert (moments.least, moments.greatest) == (float(exact.min()), float(exact.max()))
    assert moments.total == pytest.approx(float(exact.sum()), abs=tolerance * float(exact.abs().sum()))
    assert moments.squares == pytest.approx(float(exact.square().sum()), rel=tolerance)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("size", [127, 1021])
def test_bucket_sums(dtype: torch.dtype, numel: int, size: int) -> None:
    values = _values(numel, dtype)
    exact = project_by_torch(values.double(), size)
    largest = -(-numel // size) * float(values.double().abs().max())
    torch.testing.assert_close(project(values, size).double(), exact, rtol=0, atol=16 * 2.0**-24 * largest)


@pytest.mark.usefixtures("library")
def test_threads_do_not_matter() -> None:
    values = _values(9 * TILE + 5, torch.float32)
    threads, found = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        measured = one_pass(values, 509, 1)
        assert measured is not None and measured.sums is not None
        found.append((measured.words, measured.moments, bytes(measured.sums)))
    torch.set_num_threads(threads)
    assert found[0] == found[1] == found[2]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("extreme", [torch.finfo(torch.float32).min, 1e25, 1e-25, 0.0])
def test_extreme_values_are_held(extreme: float) -> None:
    """A mask of the lowest float32 and tiny values need no second reading of the tensor by torch."""
    values = torch.full((5000,), extreme)
    values[7] = 1.0
    found = statistics(values)
    assert found["l2"] == pytest.approx(float(values.double().norm()), rel=1e-6)
    assert found["mean"] == pytest.approx(float(values.double().mean()), rel=1e-6)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1023, 70000])
def test_what_is_not_finite_is_found_anywhere(dtype: torch.dtype, wrong: float, place: int) -> None:
    values = _values(TILE + 5000, dtype)
    values[place] = wrong
    expected = statistics_by_torch(values)
    assert statistics(values) == pytest.approx(expected, rel=1e-6) and expected["nan"] + expected["inf"] == 1


def test_what_no_kernel_takes() -> None:
    for tensor in (
        torch.ones(4, 4).T[1:],
        torch.empty(0),
        torch.ones(3, dtype=torch.float16),
        torch.ones(2).to("meta"),
    ):
        assert one_pass(tensor) is None
