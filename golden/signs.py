"""The pseudo-random signs that a sketch multiplies elements by, one bit each, set for -1.

Element ``i`` of the flattened tensor lies in tile ``t = i // 65536`` and in bucket ``j = i mod size``; its sign is that
of ``i mod 65536`` in the tile of signs, which all tiles share, times that of bucket ``j`` in tile ``t``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from porter.golden.random_words import random_words

TILE = 1 << 16
"""Elements of a tile."""
MOST_BUCKETS = 1024

_SPARE_BYTES = 4


class Bits(NamedTuple):
    """Bits, lowest first, and the address they lie at for as long as the array lives."""

    array: NDArray[numpy.uint8]
    address: int


@lru_cache(maxsize=8)
def tile_bits(seed: int) -> Bits:
    """A bit for each element of a tile, and spare bytes for kernels that read whole words."""
    words = random_words(seed, numpy.zeros(1, dtype=numpy.uint64), TILE // 64)
    array = numpy.concatenate([words.view(numpy.uint8).reshape(-1), numpy.zeros(_SPARE_BYTES, dtype=numpy.uint8)])
    return Bits(array, int(array.ctypes.data))


@lru_cache(maxsize=256)
def bucket_bits(seed: int, size: int, tiles: int) -> Bits:
    """[tiles, bytes]: a bit for each bucket of each tile."""
    words = random_words(seed, numpy.arange(1, tiles + 1, dtype=numpy.uint64), MOST_BUCKETS // 64)
    array = numpy.ascontiguousarray(words.view(numpy.uint8)[:, : -(-size // 8)])
    return Bits(array, int(array.ctypes.data))


@lru_cache(maxsize=8)
def tile_signs(seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """+1 and -1, [TILE]."""
    return _signs(tile_bits(seed).array[:-_SPARE_BYTES], dtype, device)


def bucket_signs(seed: int, size: int, tiles: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """+1 and -1, [tiles, size]."""
    return _signs(bucket_bits(seed, size, tiles).array, dtype, device)[:, :size]


def _signs(bits: NDArray[numpy.uint8], dtype: torch.dtype, device: torch.device) -> Tensor:
    unpacked = torch.from_numpy(numpy.unpackbits(bits, axis=-1, bitorder="little"))
    return (1 - 2 * unpacked.to(torch.int8)).to(device, dtype)
