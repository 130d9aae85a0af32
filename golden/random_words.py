"""Fixed pseudo-random numbers, the same on every machine and with every version of numpy and torch."""

from __future__ import annotations

import numpy
from numpy.typing import NDArray

Words = NDArray[numpy.uint64]

_STEP = numpy.uint64(0x9E3779B97F4A7C15)


def random_words(seed: int, streams: Words, count: int) -> Words:
    """uint64 [len(streams), count]: row i is determined by (seed, streams[i]). splitmix64 (Steele, Lea, Flood 2014)."""
    # Mixed before it is counted from: two (seed, stream) must not give shifts of the same sequence.
    start = _mix(_mix(numpy.array([seed], dtype=numpy.uint64)) + streams.astype(numpy.uint64))
    return _mix(start[:, None] + numpy.arange(1, count + 1, dtype=numpy.uint64) * _STEP)


def _mix(state: Words) -> Words:
    """splitmix64's output function."""
    state = (state ^ (state >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    mixed: Words = state ^ (state >> numpy.uint64(31))
    return mixed
