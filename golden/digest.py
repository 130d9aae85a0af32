"""Digests of tensors' bytes: fast enough to be taken of everything that passes, strong enough to stand for equality.

The bytes are cut into blocks of 4 KiB, each block is hashed to four 64-bit words, the words of all blocks are hashed
likewise with other keys, and so on until four words are left: the fingerprint. SHA-256 of it and of the length, cut to
128 bits, is the digest. A block's words are NH (Black, Halevi, Krawczyk, Krovetz, Rogaway, "UMAC", 1999) under four
independent keys: ``sum over i of (w[2i] + k[2i] mod 2**32) (w[2i+1] + k[2i+1] mod 2**32) mod 2**64`` over its 32-bit
words, filled up with zeros to a multiple of 64 bytes. For contents that do not depend on the keys two different ones
agree with probability at most 2**-128 per level. The keys are fixed and known: damage and difference are found,
forgery is not.
"""

from __future__ import annotations

import ctypes
import hashlib
from functools import cache

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from porter.golden.native import kernels, threads
from porter.golden.random_words import Words, random_words

PREFIX = "nh:"
BLOCK = 4096
_KEYS = 4
_LEVELS = 5
_SEED = 0x706F72746572
_BLOCKS_AT_ONCE = 64

_Fingerprint = ctypes.c_uint64 * _KEYS


def fingerprint(tensor: Tensor) -> bytes:
    """32 bytes that are equal for equal bytes, of a contiguous CPU tensor of up to a terabyte."""
    native = kernels()
    if native is None:
        return fingerprint_by_numpy(tensor)
    words = _Fingerprint()
    native.fingerprint(words, tensor.data_ptr(), key_address(), tensor.nbytes, threads(tensor))
    return bytes(words)


def digest_of(words: bytes, size: int) -> str:
    """The digest of ``size`` bytes whose fingerprint is ``words``."""
    return PREFIX + hashlib.sha256(words + size.to_bytes(8, "little")).hexdigest()[:32]


def content_digest(tensor: Tensor) -> str:
    """The digest of a contiguous CPU tensor's bytes, whatever its dtype and shape."""
    return digest_of(fingerprint(tensor), tensor.nbytes)


def fingerprint_by_numpy(tensor: Tensor) -> bytes:
    """``fingerprint`` without kernels."""
    content = tensor.view(-1).view(torch.uint8).numpy()
    for level in range(_LEVELS):
        words = _level(content, _keys()[level])
        if len(words) == 1:
            return words.tobytes()
        content = words.view(numpy.uint8).reshape(-1)
    raise ValueError(f"{tensor.nbytes} bytes are more than a terabyte")


def _level(content: NDArray[numpy.uint8], keys: NDArray[numpy.uint32]) -> Words:
    """The words [blocks, 4] of all blocks."""
    whole = len(content) // BLOCK
    rest = content[whole * BLOCK :]
    parts = [
        _hashed(content[start * BLOCK : min(start + _BLOCKS_AT_ONCE, whole) * BLOCK].reshape(-1, BLOCK), keys)
        for start in range(0, whole, _BLOCKS_AT_ONCE)
    ]
    if len(rest) or not whole:
        filled = numpy.zeros((1, -(-len(rest) // 64) * 64), dtype=numpy.uint8)
        filled[0, : len(rest)] = rest
        parts.append(_hashed(filled, keys))
    return numpy.concatenate(parts)


def _hashed(blocks: NDArray[numpy.uint8], keys: NDArray[numpy.uint32]) -> Words:
    words = blocks.view(numpy.uint32)
    hashed = numpy.empty((len(blocks), _KEYS), dtype=numpy.uint64)
    for number, key in enumerate(keys[:, : words.shape[1]]):
        pairs = (words + key).view(numpy.uint64)
        hashed[:, number] = ((pairs & numpy.uint64(0xFFFFFFFF)) * (pairs >> numpy.uint64(32))).sum(axis=1)
    return hashed


@cache
def _keys() -> NDArray[numpy.uint32]:
    """uint32 [levels, 4, words of a block]."""
    streams = numpy.arange(_LEVELS, dtype=numpy.uint64)
    words = random_words(_SEED, streams, _KEYS * BLOCK // 8)
    return words.view(numpy.uint32).reshape(_LEVELS, _KEYS, BLOCK // 4)


@cache
def key_address() -> int:
    """Where the keys of all levels lie in memory, for the kernels."""
    return int(_keys().ctypes.data)
