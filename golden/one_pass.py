"""Moments and bucket sums of a tensor, read once by the compiled kernels."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from porter.golden.native import kernels, threads
from porter.golden.signs import TILE, bucket_bits, tile_bits
from porter.kernels.cpu.layout import FLOAT_CODES

_Four = ctypes.c_double * 4


class Moments(NamedTuple):
    """Of all elements. ``total`` or ``squares`` is not finite where an element is not, or its square overflows."""

    least: float
    greatest: float
    total: float
    squares: float


def one_pass(tensor: Tensor, size: int | None, seed: int) -> tuple[Moments, Tensor | None] | None:
    """The moments, and the sums [size] in float32 of the ``size`` buckets of a sketch; None where no kernel takes the
    tensor (which is float32 or bfloat16, contiguous, on the CPU and not empty).

    Sums run in float32 over at most 32 elements (bucket sums: 16), then in float64, in an order that does not depend on
    the number of threads.
    """
    code = FLOAT_CODES.get(tensor.dtype)
    numel = tensor.numel()
    if code is None or not (tensor.is_cpu and tensor.is_contiguous() and numel):
        return None
    native = kernels()
    if native is None:
        return None
    moments = _Four()
    if size is None:
        native.measure(moments, None, tensor.data_ptr(), None, None, numel, 1, code, threads(tensor))
        return Moments(*moments), None
    sums = (ctypes.c_double * size)()
    flips = bucket_bits(seed, size, -(-numel // TILE)).address
    address = tile_bits(seed).address
    native.measure(moments, sums, tensor.data_ptr(), address, flips, numel, size, code, threads(tensor))
    return Moments(*moments), torch.frombuffer(sums, dtype=torch.float64).float()
