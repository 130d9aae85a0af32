"""Sketches: a tensor reduced to a few hundred numbers from which errors against another sketch are estimated.

The tensor ``x`` of n elements, flattened in row-major order, is folded into m buckets (m prime, bucket of element i is
i mod m) after each element is multiplied by a fixed pseudo-random sign: ``y[j] = sum over i = j mod m of s[i] x[i]``.
This is the count sketch (Charikar, Chen, Farach-Colton 2002) with a fixed instead of a hashed bucket: the signs alone
make ``E |y_a - y_b|^2 = |a - b|^2``. A prime m keeps a channel (stride hidden_size) and a row from falling into few
buckets. The signs of different buckets are independent, so the spread of the m squared differences gives the standard
error of their sum; for differences without structure it is a relative ``sqrt(2/m)`` of the squared norm, hence
``sqrt(1/(2m))`` of the norm: 3.6 % for m = 383.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy
import torch
from torch import Tensor

from porter.golden.statistics import l2_norm

SEED = 20240229
BUCKETS = (127, 191, 251, 383, 509, 761, 1021)
"""Sizes a sketch can have: primes, so that no hidden size is a multiple of one."""

_BYTES_PER_BUCKET = 600
_TILE = 1 << 17
_ROUNDING = 2.0**-23
_EXACT_DTYPE = torch.float64


@dataclass(frozen=True)
class Sketch:
    """``values``: the m bucket sums, or all elements in float64 when ``exact``. ``norm``: the tensor's own L2 norm."""

    values: Tensor
    norm: float
    numel: int
    seed: int = SEED
    exact: bool = False


def buckets(tensor_bytes: int) -> int | None:
    """How many buckets a tensor of so many bytes gets (at most 1/150 of its size), or None if it is stored whole."""
    fitting = [size for size in BUCKETS if size * _BYTES_PER_BUCKET <= tensor_bytes]
    return fitting[-1] if fitting else None


def _mix(state: numpy.ndarray) -> numpy.ndarray:
    """splitmix64's output function (Steele, Lea, Flood 2014): the same signs on every machine and torch version."""
    state = (state ^ (state >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    mixed: numpy.ndarray = state ^ (state >> numpy.uint64(31))
    return mixed


def _random_signs(seed: int, stream: int, count: int) -> Tensor:
    """``count`` numbers of +1 or -1 in float32, determined by (seed, stream)."""
    # Mixed before it is counted from: two (seed, stream) must not give shifts of the same sequence.
    start = _mix(_mix(numpy.array([seed], dtype=numpy.uint64)) + numpy.array([stream], dtype=numpy.uint64))
    counter = numpy.arange(1, count + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
    bits = _mix(counter + start) >> numpy.uint64(63)
    return torch.from_numpy(bits.astype(numpy.float32) * 2 - 1)


@lru_cache(maxsize=32)
def _sign_tile(seed: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    rows = _TILE // size
    return _random_signs(seed, size, rows * size).view(rows, size).to(device=device, dtype=dtype)


@lru_cache(maxsize=1024)
def _tile_signs(seed: int, size: int, tile: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _random_signs(seed, (tile << 16) + size, size).to(device=device, dtype=dtype)


def project(tensor: Tensor, size: int, seed: int = SEED) -> Tensor:
    """The bucket sums ``[size]`` of a floating-point tensor, in float32 (float64 for a float64 tensor).

    Elements are taken in row-major order whatever the strides. A tensor longer than one tile of signs reuses the tile,
    each time with other signs per bucket, so that a difference repeated in every row does not repeat its signs.
    """
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    flat = tensor.detach().reshape(-1)
    signs = _sign_tile(seed, size, dtype, flat.device)
    span = signs.numel()
    total = _project_tile(flat[:span], signs)
    for tile, start in enumerate(range(span, flat.numel(), span), start=1):
        folded = _project_tile(flat[start : start + span], signs)
        total += folded.mul_(_tile_signs(seed, size, tile, dtype, flat.device))
    return total


def _project_tile(flat: Tensor, signs: Tensor) -> Tensor:
    size = signs.shape[1]
    rows, rest = divmod(flat.numel(), size)
    folded = (flat[: rows * size].view(rows, size) * signs[:rows]).sum(dim=0)
    if rest:
        folded[:rest] += flat[rows * size :] * signs[rows, :rest]
    return folded


def sketch(tensor: Tensor, seed: int = SEED, tensor_bytes: int | None = None) -> Sketch:
    """The sketch of a tensor, of the size that the golden uses for it (``tensor_bytes``: of the golden's tensor, where
    this one has another dtype). Small tensors and integers are kept exactly."""
    flat = tensor.detach().reshape(-1)
    size = buckets(tensor.numel() * tensor.element_size() if tensor_bytes is None else tensor_bytes)
    if size is None or not tensor.is_floating_point():
        values = flat.to(_EXACT_DTYPE)
        return Sketch(values, float(torch.linalg.vector_norm(values)), flat.numel(), seed, exact=True)
    norm = float(l2_norm(flat, torch.float64 if flat.dtype == torch.float64 else torch.float32))
    return Sketch(project(flat, size, seed), norm, flat.numel(), seed)


def _squared_difference(candidate: Sketch, golden: Sketch) -> tuple[float, float]:
    """``|candidate - golden|^2`` and its standard error."""
    if (candidate.numel, candidate.seed) != (golden.numel, golden.seed) or len(candidate.values) != len(golden.values):
        raise ValueError(
            f"sketches of different tensors: {candidate.numel} and {golden.numel} elements, seeds {candidate.seed} and "
            f"{golden.seed}, sizes {len(candidate.values)} and {len(golden.values)}"
        )
    squares = (candidate.values.double() - golden.values.double().to(candidate.values.device)).square()
    total = float(squares.sum())
    if golden.exact:
        return total, 0.0
    return total, math.sqrt(len(squares) * float(squares.var()))


def relative_error(candidate: Sketch, golden: Sketch) -> tuple[float, float]:
    """``|candidate - golden| / |golden|`` (L2) as (estimate, standard error); the error is 0.0 for exact sketches.

    The standard error adds the rounding of the bucket sums, 2**-23 of the norms: a smaller difference cannot be seen.
    A golden of norm zero gives 0 for an equal candidate and infinity else. NaN if either holds a NaN or infinity.
    """
    squared, deviation = _squared_difference(candidate, golden)
    difference = math.sqrt(squared) if squared >= 0 else math.nan
    if golden.norm == 0:
        return (0.0 if difference == 0 else math.inf if difference > 0 else math.nan), 0.0
    if golden.exact or math.isnan(difference):
        return difference / golden.norm, 0.0 if golden.exact else math.nan
    spread = deviation / (2 * difference) if difference else 0.0
    rounding = _ROUNDING * (candidate.norm + golden.norm)
    return difference / golden.norm, math.hypot(spread, rounding) / golden.norm


def cosine(candidate: Sketch, golden: Sketch) -> tuple[float, float]:
    """Cosine of the angle between the two tensors as (estimate, standard error).

    From the exact norms and the estimated difference, ``(|a|^2 + |b|^2 - |a-b|^2) / (2 |a| |b|)``: for near tensors its
    error shrinks with the difference. NaN if either norm is zero or not finite.
    """
    squared, deviation = _squared_difference(candidate, golden)
    scale = 2 * candidate.norm * golden.norm
    if not (scale > 0 and math.isfinite(scale)):
        return math.nan, math.nan
    return (candidate.norm**2 + golden.norm**2 - squared) / scale, deviation / scale
