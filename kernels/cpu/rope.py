"""Rotary position embedding on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

import torch

from porter.kernels.cpu.layout import EMPTY, FLOAT_CODES, NOT_CPU, NOT_FLOAT, OTHER_DTYPE, OTHER_SHAPE, threads_for
from porter.kernels.cpu.library import KernelLibrary

Rope = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

ComplexRope = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

TrailingRope = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

COMPLEX, TRAILING = 2, 3
"""The kernel's numbers for these styles; half is 0, interleaved 1."""
FLOAT32_BYTES = 4

# ctypes passes packed bytes several times faster than an array it must build.
_pack = Struct("22q").pack


def rope(library: KernelLibrary, interleaved: bool) -> Rope:
    """Rotated copies of query and key, in their memory layout."""

    def call(
        query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query_out, key_out = torch.empty_like(query), torch.empty_like(key)
        batch, heads, length, size = query.shape
        cos_stride = cos.stride() if cos.shape[0] == batch else (0, *cos.stride()[1:])
        sin_stride = sin.stride() if sin.shape[0] == batch else (0, *sin.stride()[1:])
        geometry = _pack(
            batch, length, size, cos.shape[-1], heads, key.shape[1], *query.stride()[:3], *query_out.stride()[:3],
            *key.stride()[:3], *key_out.stride()[:3], *cos_stride[:2], *sin_stride[:2],
        )
        library.rope(
            query_out.data_ptr(), key_out.data_ptr(), query.data_ptr(), key.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            geometry, interleaved, FLOAT_CODES[query.dtype], FLOAT_CODES[cos.dtype],
            threads_for(4 * (query.numel() + key.numel())),
        )
        return query_out, key_out

    return call


def accepts_rope(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> str | None:
    """float32 or bfloat16 heads, contiguous in the last dimension."""
    if not (query.is_cpu and key.is_cpu and cos.is_cpu and sin.is_cpu):
        return NOT_CPU
    if query.dtype not in FLOAT_CODES or cos.dtype not in FLOAT_CODES:
        return NOT_FLOAT
    if key.dtype is not query.dtype or sin.dtype is not cos.dtype:
        return OTHER_DTYPE
    shape, key_shape, angles = query.shape, key.shape, cos.shape
    if len(shape) != 4 or len(key_shape) != 4 or len(angles) != 3:
        return "query and key are not [B, H, S, D], or cos is not [B, S, R]"
    batch, heads, length, size = shape
    batches, positions, rotary = angles
    if key_shape != (batch, key_shape[1], length, size) or sin.shape != angles:
        return OTHER_SHAPE
    if (batches != 1 and batches != batch) or positions != length or rotary > size:
        return OTHER_SHAPE
    if query.stride(3) != 1 or key.stride(3) != 1 or cos.stride(2) != 1 or sin.stride(2) != 1:
        return "the last dimension is not contiguous"
    return None if batch and heads and length and key_shape[1] else EMPTY


def complex_rope(library: KernelLibrary) -> ComplexRope:
    """As `rope` for pairs that are neighbours, before and after; the angles are complex numbers."""

    def call(query: torch.Tensor, key: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query_out, key_out = torch.empty_like(query), torch.empty_like(key)
        batch, heads, length, size = query.shape
        # In numbers of float32, two of which make a complex one.
        strides = (2 * angles.stride(0) if angles.shape[0] == batch else 0, 2 * angles.stride(1))
        geometry = _pack(
            batch, length, size, size, heads, key.shape[1], *query.stride()[:3], *query_out.stride()[:3],
            *key.stride()[:3], *key_out.stride()[:3], *strides, *strides,
        )
        cosines = angles.data_ptr()
        library.rope(
            query_out.data_ptr(), key_out.data_ptr(), query.data_ptr(), key.data_ptr(), cosines,
            cosines + FLOAT32_BYTES, geometry, COMPLEX, FLOAT_CODES[query.dtype], FLOAT_CODES[torch.float32],
            threads_for(4 * (query.numel() + key.numel())),
        )
        return query_out, key_out

    return call


def accepts_complex(query: torch.Tensor, key: torch.Tensor, angles: torch.Tensor) -> str | None:
    """float32 or bfloat16 heads, contiguous in the last dimension, and complex64 angles."""
    if not (query.is_cpu and key.is_cpu and angles.is_cpu):
        return NOT_CPU
    if query.dtype not in FLOAT_CODES or angles.dtype is not torch.complex64:
        return NOT_FLOAT
    if key.dtype is not query.dtype:
        return OTHER_DTYPE
    shape, key_shape, angle_shape = query.shape, key.shape, angles.shape
    if len(shape) != 4 or len(key_shape) != 4 or len(angle_shape) != 3:
        return "query and key are not [B, H, S, D], or the angles are not [B, S, D/2]"
    batch, heads, length, size = shape
    if key_shape != (batch, key_shape[1], length, size):
        return OTHER_SHAPE
    if (angle_shape[0] != 1 and angle_shape[0] != batch) or angle_shape[1:] != (length, size // 2) or size % 2:
        return OTHER_SHAPE
    if query.stride(3) != 1 or key.stride(3) != 1 or angles.stride(2) != 1 or angles.is_conj():
        return "the last dimension is not contiguous"
    return None if batch and heads and length and size and key_shape[1] else EMPTY


def trailing_rope(library: KernelLibrary) -> TrailingRope:
    """A copy in the memory layout of the heads, with their last dimensions turned as neighbours."""

    def call(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(states)
        batch, heads, length, size = states.shape
        cos_stride = cos.stride() if cos.shape[0] == batch else (0, *cos.stride()[1:])
        sin_stride = sin.stride() if sin.shape[0] == batch else (0, *sin.stride()[1:])
        geometry = _pack(
            batch, length, size, 2 * cos.shape[-1], heads, 0, *states.stride()[:3], *out.stride()[:3],
            0, 0, 0, 0, 0, 0, *cos_stride[:2], *sin_stride[:2],
        )
        library.rope(
            out.data_ptr(), None, states.data_ptr(), None, cos.data_ptr(), sin.data_ptr(), geometry, TRAILING,
            FLOAT_CODES[states.dtype], FLOAT_CODES[cos.dtype], threads_for(4 * states.numel()),
        )
        return out

    return call


def accepts_trailing(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> str | None:
    """float32 or bfloat16 heads, contiguous in the last dimension; angles of either dtype."""
    if not (states.is_cpu and cos.is_cpu and sin.is_cpu):
        return NOT_CPU
    if states.dtype not in FLOAT_CODES or cos.dtype not in FLOAT_CODES:
        return NOT_FLOAT
    if sin.dtype is not cos.dtype:
        return OTHER_DTYPE
    if states.dim() != 4 or cos.dim() != 3 or sin.shape != cos.shape:
        return "states are not [B, H, S, D], or cos and sin not [B, S, R/2]"
    batch, _, length, size = states.shape
    batches, positions, pairs = cos.shape
    if batches not in (1, batch) or positions != length or 2 * pairs > size:
        return OTHER_SHAPE
    if states.stride(3) != 1 or cos.stride(2) != 1 or sin.stride(2) != 1:
        return "the last dimension is not contiguous"
    return None if states.numel() and pairs else EMPTY


def accepts_interleaved(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> str | None:
    """As `accepts_rope`, with all of the head rotated."""
    if cos.shape[-1] != query.shape[-1]:
        return "the interleaved variant rotates whole heads"
    return accepts_rope(query, key, cos, sin)
