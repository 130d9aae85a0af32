"""Attention within segments of one packed sequence, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct, pack

import torch

from porter.kernels.cpu.layout import EMPTY, FLOAT_CODES, NOT_CPU, NOT_FLOAT, OTHER_DTYPE, OTHER_SHAPE, threads_for
from porter.kernels.cpu.library import KernelLibrary
from porter.kernels.reference.variable_length import segments

VariableLength = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]

LAST_STRIDED = "the last dimension is not contiguous"

TORCH_FROM_TOKENS = 192
"""Tokens of a segment, on average, from which torch's fused attention is faster: measured at 16 heads of 80 on one core
of an AMD EPYC (Zen 4), 1.2 times at 256 tokens and 1.6 at 1024, where the kernel here is 1.2 to 2 times faster at 64
tokens and below."""

_pack_shape = Struct("4q").pack
_pack_strides = Struct("6q").pack


def variable_length(library: KernelLibrary, torch_from: int = TORCH_FROM_TOKENS) -> VariableLength:
    """All segments and heads in one call of the kernel; torch's fused attention from `torch_from` tokens a segment."""

    def call(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        tokens, heads, size = query.shape
        value_size = value.shape[2]
        found = segments(cu_seqlens, tokens)
        if tokens >= torch_from * len(found) and value_size == size:
            return _by_torch(query, key, value, found, scaling)
        bounds = (0, *(high for _, high in found))
        out = torch.empty((tokens, heads, value_size), dtype=query.dtype)
        pairs = sum((high - low) ** 2 for low, high in found)
        library.variable_length(
            out.data_ptr(), query.data_ptr(), key.data_ptr(), value.data_ptr(), pack(f"{len(bounds)}q", *bounds),
            _pack_shape(len(found), heads, size, value_size),
            _pack_strides(*query.stride()[:2], *key.stride()[:2], *value.stride()[:2]),
            scaling, FLOAT_CODES[query.dtype], threads_for(heads * pairs * (size + value_size)),
        )
        return out

    return call


def _by_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, found: list[tuple[int, int]], scaling: float
) -> torch.Tensor:
    out = torch.empty(query.shape, dtype=query.dtype)
    for low, high in found:
        q, k, v = (t[low:high].transpose(0, 1)[None] for t in (query, key, value))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scaling)
        out[low:high] = attended[0].transpose(0, 1)
    return out


def accepts_variable_length(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, scaling: float
) -> str | None:
    """CPU tensors of one dtype, float32 or bfloat16, contiguous in the last dimension."""
    if not (query.is_cpu and key.is_cpu and value.is_cpu and cu_seqlens.is_cpu):
        return NOT_CPU
    dtype = query.dtype
    if dtype not in FLOAT_CODES:
        return NOT_FLOAT
    if key.dtype is not dtype or value.dtype is not dtype:
        return OTHER_DTYPE
    if query.stride(2) != 1 or key.stride(2) != 1 or value.stride(2) != 1:
        return LAST_STRIDED
    if not (query.numel() and value.numel()):
        return EMPTY
    return None if key.shape == query.shape and value.shape[:2] == query.shape[:2] else OTHER_SHAPE
