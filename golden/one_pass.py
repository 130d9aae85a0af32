"""Fingerprint, moments and bucket sums of a tensor, read once by the compiled kernels."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from porter.golden.digest import key_address
from porter.golden.native import kernels, threads
from porter.golden.signs import TILE, bucket_bits, tile_bits
from porter.kernels.cpu.layout import FLOAT_CODES

_Four = ctypes.c_double * 4
_Words = ctypes.c_uint64 * 4
_NOTHING = torch.empty(0)


class Moments(NamedTuple):
    """Of all elements. ``total`` or ``squares`` is not finite where an element is not, or its square overflows."""

    least: float
    greatest: float
    total: float
    squares: float


class Measured(NamedTuple):
    """``words``: the fingerprint, see ``digest.py``. ``sums``: a sketch's, float32 [buckets]."""

    words: bytes
    moments: Moments
    sums: Tensor


def one_pass(tensor: Tensor, size: int = 0, seed: int = 0) -> Measured | None:
    """Fingerprint, moments and the sums of ``size`` buckets; None where no kernel takes the tensor (which is float32 or
    bfloat16, contiguous, on the CPU and not empty).

    Sums run in float32 over at most 32 elements (bucket sums: 16), then in float64, in an order that does not depend on
    the number of threads.
    """
    code = FLOAT_CODES.get(tensor.dtype)
    numel = tensor.numel()
    if code is None or not (numel and tensor.is_cpu and tensor.is_contiguous()):
        return None
    native = kernels()
    if native is None:
        return None
    words, moments, signs, flips = _Words(), _Four(), 0, 0
    sums = (ctypes.c_double * size)() if size else None
    if size:
        signs, flips = tile_bits(seed).address, bucket_bits(seed, size, -(-numel // TILE)).address
    address = tensor.data_ptr()
    native.measure(words, moments, sums, address, key_address(), signs, flips, numel, size or 1, code, threads(tensor))
    folded = _NOTHING if sums is None else torch.frombuffer(sums, dtype=torch.float64).float()
    return Measured(bytes(words), Moments(*moments), folded)
