"""Sketches estimate known perturbations within their stated error, also where the difference has structure."""

from __future__ import annotations

import math

import pytest
import torch

from porter.golden.sketch import BUCKETS, Sketch, buckets, cosine, project, relative_error, sketch

SHAPE = (128, 512)


def _noise(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _structured(kind: str, seed: int) -> torch.Tensor:
    """A difference of unit scale: dense noise, one channel, one row, one element, one vector in every row, or a few."""
    base, difference = _noise(SHAPE, seed), torch.zeros(SHAPE, dtype=torch.float64)
    channel, row = seed * 37 % SHAPE[1], seed * 11 % SHAPE[0]
    if kind == "noise":
        return base
    if kind == "channel":
        difference[:, channel] = base[:, channel]
    elif kind == "constant-channel":
        difference[:, channel] = 1
    elif kind == "row":
        difference[row] = base[row]
    elif kind == "element":
        difference[row, channel] = 3
    elif kind == "same-row":
        difference += base[0]
    elif kind == "constant":
        difference += 1
    return difference


KINDS = ("noise", "channel", "constant-channel", "row", "element", "same-row", "constant")


@pytest.mark.parametrize("kind", KINDS)
def test_estimate_lies_within_the_stated_error(kind: str) -> None:
    """Of 24 tensors, the deviations in units of the stated error have a root mean square near 1 and none reaches 5."""
    deviations = []
    for seed in range(24):
        golden = _noise(SHAPE, 1000 + seed).float()
        candidate = (golden.double() + 1e-2 * _structured(kind, seed)).float()
        true = float((candidate.double() - golden.double()).norm() / golden.double().norm())
        estimate, error = relative_error(sketch(candidate), sketch(golden))
        deviations.append((estimate - true) / error)
        assert error < 0.25 * true or kind in ("element", "row", "channel", "constant-channel")
    assert max(abs(deviation) for deviation in deviations) < 5
    assert math.sqrt(sum(deviation**2 for deviation in deviations) / len(deviations)) < 1.7


@pytest.mark.parametrize("kind", ["noise", "same-row", "constant"])
def test_error_is_what_the_bucket_count_promises(kind: str) -> None:
    """Over many differences the estimates scatter by sqrt(1/(2m)): no structure defeats the signs."""
    size = 251
    ratios = torch.tensor(
        [float(project(_structured(kind, seed), size).norm() / _structured(kind, seed).norm()) for seed in range(24)]
    )
    # The signs are fixed, so a difference that is the same for every seed yields one sample of the distribution.
    assert float((ratios - 1).abs().max()) < 5 * math.sqrt(1 / (2 * size))


def test_unbiased_over_seeds() -> None:
    """The mean over 200 sign seeds of the squared norm is the squared norm, to 4 standard errors of the mean."""
    values = _noise((64, 127), 5)
    for difference in (values, torch.ones(64, 127, dtype=torch.float64)):
        squared = torch.tensor([float(project(difference, 127, seed).square().sum()) for seed in range(200)])
        mean = float(squared.mean() / difference.square().sum())
        assert abs(mean - 1) < 4 * math.sqrt(2 / 127 / 200) * 2


def test_tiles_beyond_the_first_have_other_signs() -> None:
    """A difference repeated in every tile does not add up: the second tile's signs are not the first's."""
    size = 127
    tile = (1 << 17) // size * size
    repeated = torch.ones(8 * tile)
    ratio = float(project(repeated, size).norm() / repeated.norm())
    assert abs(ratio - 1) < 5 * math.sqrt(8 / size) / 2


@pytest.mark.parametrize("numel", [1, 126, 127, 128, 65536, (1 << 17) + 5])
def test_every_element_counts_once(numel: int) -> None:
    for place in {0, numel // 2, numel - 1}:
        one = torch.zeros(numel)
        one[place] = 3
        folded = project(one, 127)
        assert folded[place % 127].abs() == 3 and folded.count_nonzero() == 1


def test_difference_of_sketches_is_sketch_of_difference() -> None:
    a, b = _noise((7, 11, 131), 1), _noise((7, 11, 131), 2)
    torch.testing.assert_close(project(a, 127) - project(b, 127), project(a - b, 127), rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_layout_and_dtype_do_not_matter(dtype: torch.dtype) -> None:
    values = _noise((129, 257), 3).to(dtype)
    strided = torch.empty(257, 129, dtype=dtype).T.copy_(values)
    assert not strided.is_contiguous()
    assert torch.equal(project(values, 191), project(strided, 191))
    upcast = project(values.double(), 191)
    # Each bucket adds 174 numbers of magnitude up to 5 in float32.
    torch.testing.assert_close(project(values, 191).double(), upcast, rtol=0, atol=174 * 5 * 2.0**-23)


def test_equal_tensors() -> None:
    values = _noise(SHAPE, 1).float()
    estimate, error = relative_error(sketch(values), sketch(values))
    assert estimate == 0 and 0 < error < 1e-6
    assert cosine(sketch(values), sketch(values))[0] == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("shape", [(0,), (1,), (13,), (31, 17)])
def test_small_tensors_are_exact(shape: tuple[int, ...]) -> None:
    golden, candidate = _noise(shape, 1).float(), _noise(shape, 2).float()
    estimate, error = relative_error(sketch(candidate), sketch(golden))
    true = float((candidate.double() - golden.double()).norm() / golden.double().norm()) if golden.numel() else 0.0
    assert estimate == pytest.approx(true, rel=1e-12) and error == 0


def test_integers_are_exact_whatever_their_size() -> None:
    indices = torch.arange(200_000)
    assert sketch(indices).exact and len(sketch(indices).values) == 200_000


def test_zero_and_not_finite_tensors() -> None:
    zero, some = torch.zeros(SHAPE), _noise(SHAPE, 1).float()
    assert relative_error(sketch(zero), sketch(zero)) == (0.0, 0.0)
    assert relative_error(sketch(some), sketch(zero))[0] == math.inf
    assert relative_error(sketch(zero), sketch(some))[0] == pytest.approx(1, abs=0.2)
    broken = some.clone()
    broken[3, 4] = math.nan
    assert math.isnan(relative_error(sketch(broken), sketch(some))[0])
    assert math.isnan(cosine(sketch(broken), sketch(some))[0])


def test_cosine_of_near_and_of_unrelated_tensors() -> None:
    golden = _noise(SHAPE, 1)
    for scale in (1e-3, 0.3, 30.0):
        candidate = golden + scale * _noise(SHAPE, 2)
        true = float((candidate * golden).sum() / candidate.norm() / golden.norm())
        estimate, error = cosine(sketch(candidate), sketch(golden))
        assert abs(estimate - true) < 5 * error


def test_size_is_at_most_a_hundredth() -> None:
    for tensor_bytes in range(1000, 2_000_000, 999):
        size = buckets(tensor_bytes)
        assert size is None or (size in BUCKETS and size * 4 * 100 <= tensor_bytes)
    assert buckets(100_000) is not None


def test_sketches_of_different_tensors_are_refused() -> None:
    a = sketch(torch.ones(SHAPE))
    with pytest.raises(ValueError, match="different tensors"):
        relative_error(a, sketch(torch.ones(128, 513)))
    with pytest.raises(ValueError, match="different tensors"):
        relative_error(a, Sketch(a.values, a.norm, a.numel, seed=1))


def test_candidate_of_another_dtype_takes_the_golden_size() -> None:
    golden = _noise(SHAPE, 1)
    narrow = golden.to(torch.bfloat16)
    with pytest.raises(ValueError):
        relative_error(sketch(narrow), sketch(golden.float()))
    estimate, error = relative_error(sketch(narrow, tensor_bytes=golden.numel() * 4), sketch(golden.float()))
    true = float((narrow.double() - golden).norm() / golden.norm())
    assert abs(estimate - true) < 5 * error
