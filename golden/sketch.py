"""Sketches: a tensor reduced to a few hundred numbers from which errors against another sketch are estimated.

The tensor ``x`` of n elements, flattened in row-major order, is folded into m buckets (m prime, bucket of element i is
i mod m) after each element is multiplied by a fixed pseudo-random sign: ``y[j] = sum over i = j mod m of s[i] x[i]``.
This is the count sketch (Charikar, Chen, Farach-Colton 2002) with a fixed instead of a hashed bucket: the signs alone
make ``E |y_a - y_b|^2 = |a - b|^2``. Every 65,536 elements the signs repeat, times another sign per bucket, so that a
difference repeated in every tile does not repeat its signs. A prime m keeps a channel (stride hidden_size) and a row
from falling into few buckets. The signs of different buckets are independent, so the spread of the m squared
differences gives the standard error of their sum; for differences without structure it is a relative ``sqrt(2/m)`` of
the squared norm, hence ``sqrt(1/(2m))`` of the norm: 3.6 % for m = 383.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from porter.golden.one_pass import one_pass
from porter.golden.signs import TILE, bucket_signs, tile_signs
from porter.golden.statistics import statistics

SEED = 20261130
BUCKETS = (127, 191, 251, 383, 509, 761, 1021)
"""Sizes a sketch can have: primes, so that no hidden size is a multiple of one."""

_BYTES_PER_BUCKET = 600
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


@lru_cache(maxsize=4096)
def buckets(tensor_bytes: int) -> int | None:
    """How many buckets a tensor of so many bytes gets (at most 1/150 of its size), or None if it is stored whole."""
    fitting = [size for size in BUCKETS if size * _BYTES_PER_BUCKET <= tensor_bytes]
    return fitting[-1] if fitting else None


def project(tensor: Tensor, size: int, seed: int = SEED) -> Tensor:
    """The bucket sums ``[size]`` of a floating-point tensor, in float32 (float64 for a float64 tensor).

    Elements are taken in row-major order whatever the strides. Without kernels the float32 sums run over the elements
    of one bucket in one tile.
    """
    measured = one_pass(tensor.detach().contiguous(), size, seed)
    if measured is None or measured.sums is None:
        return project_by_torch(tensor, size, seed)
    return torch.frombuffer(measured.sums, dtype=torch.float32)


def project_by_torch(tensor: Tensor, size: int, seed: int = SEED) -> Tensor:
    """``project`` without kernels."""
    flat = tensor.detach().reshape(-1)
    dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
    tiles = -(-flat.numel() // TILE)
    signs, flips = tile_signs(seed, dtype, flat.device), bucket_signs(seed, size, tiles, dtype, flat.device)
    total = torch.zeros(size, dtype=torch.float64, device=flat.device)
    for tile in range(tiles):
        part = flat[tile * TILE : (tile + 1) * TILE]
        first = tile * TILE % size
        folded = torch.zeros(-(-(first + part.numel()) // size) * size, dtype=dtype, device=flat.device)
        torch.mul(part, signs[: part.numel()], out=folded[first : first + part.numel()])
        total += folded.view(-1, size).sum(dim=0) * flips[tile]
    return total.to(dtype)


def sketch(tensor: Tensor, seed: int = SEED, tensor_bytes: int | None = None) -> Sketch:
    """The sketch of a tensor, of the size that the golden uses for it (``tensor_bytes``: of the golden's tensor, where
    this one has another dtype). Small tensors and integers are kept exactly."""
    flat = tensor.detach().reshape(-1)
    size = buckets(tensor.numel() * tensor.element_size() if tensor_bytes is None else tensor_bytes)
    if size is None or not tensor.is_floating_point():
        values = flat.to(_EXACT_DTYPE)
        return Sketch(values, float(torch.linalg.vector_norm(values)), flat.numel(), seed, exact=True)
    return Sketch(project(flat, size, seed), norm_of(statistics(flat)), flat.numel(), seed)


def norm_of(stats: dict[str, Any]) -> float:
    """The L2 norm that a sketch states: NaN where an element is not finite."""
    return math.nan if stats["nan"] or stats["inf"] else float(stats["l2"])


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
