"""Fingerprint, moments and bucket sums of a tensor, read once by the compiled kernels."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from porter.golden.digest import key_address
from porter.golden.native import kernels, threads
from porter.golden.signs import TILE, bucket_bits, tile_bits

_Four = ctypes.c_double * 4
_Words = ctypes.c_uint64 * 4
_CODES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.int8: 2,
    torch.uint8: 3,
    torch.bool: 3,
    torch.int16: 4,
    torch.int32: 5,
    torch.int64: 6,
    torch.float64: 7,
}
"""dtypes to the codes in measure.cpp."""

FOLDED = (torch.float32, torch.bfloat16)
"""dtypes whose bucket sums the kernels take."""


class Moments(NamedTuple):
    """Of all elements. ``total`` or ``squares`` is not finite where an element is not."""

    least: float
    greatest: float
    total: float
    squares: float


class Measured(NamedTuple):
    """``words``: the fingerprint, see ``digest.py``. ``sums``: a sketch's, float32 [buckets], if asked for."""

    words: bytes
    moments: Moments
    sums: ctypes.Array[ctypes.c_float] | None


def one_pass(tensor: Tensor, size: int = 0, seed: int = 0) -> Measured | None:
    """Fingerprint, moments and, for ``FOLDED`` dtypes, the sums of ``size`` buckets; None where no kernel takes the
    tensor (which is real, of more than 8 bits if floating, not float16, contiguous, on the CPU and not empty).

    Sums of float32 and bfloat16 run in float32 over at most 32 elements (bucket sums: 16), then in float64, in an order
    that does not depend on the number of threads; those of other dtypes in float64.
    """
    code = _CODES.get(tensor.dtype)
    numel = tensor.numel()
    if code is None or not (numel and tensor.is_cpu and tensor.is_contiguous()) or (size and code > 1):
        return None
    native = kernels()
    if native is None:
        return None
    words, moments, signs, flips = _Words(), _Four(), 0, 0
    sums = (ctypes.c_float * size)() if size else None
    if size:
        signs, flips = tile_bits(seed).address, bucket_bits(seed, size, -(-numel // TILE)).address
    address = tensor.data_ptr()
    native.measure(words, moments, sums, address, key_address(), signs, flips, numel, size or 1, code, threads(tensor))
    return Measured(bytes(words), Moments(*moments), sums)
