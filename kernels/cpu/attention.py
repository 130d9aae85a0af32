"""Attention on the CPU: over a key-value cache, and over the compressed cache of multi-head latent attention."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

import torch

from porter.kernels.cpu.layout import (
    EMPTY,
    FLOAT_CODES,
    NOT_CONTIGUOUS,
    NOT_CPU,
    NOT_FLOAT,
    OTHER_DTYPE,
    OTHER_SHAPE,
    threads_for,
)
from porter.kernels.cpu.library import DTYPE_CODES, KernelLibrary
from porter.kernels.cpu.linear import linear

Mask = torch.Tensor | None
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Mask, float, "int | None"], torch.Tensor]
MlaAttention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Mask, float], torch.Tensor
]

MASK_DTYPES = (torch.bool, *FLOAT_CODES)
TORCH_FROM_QUERIES = 16
"""Queries from which torch's fused attention is used where it has one for the case. Chosen by judgement: not yet
measured."""

LAST_STRIDED = "the last dimension is not contiguous"
NO_WINDOW = "the sliding window is less than one key"

_pack_shape = Struct("8q").pack
_pack_attention = Struct("13q").pack
_pack_mla = Struct("14q").pack
_NO_MASK = (0, 0, 0, 0)


def attention(library: KernelLibrary) -> Attention:
    """Grouped-query attention; torch's fused kernel where whole prompts are causal from their start."""

    def call(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Mask,
        scaling: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        batch, heads, length, size = query.shape
        keys, value_size = value.shape[2:]
        plain = attention_mask is None and _is_plain_prefill(query, key, value, sliding_window)
        if plain and length >= TORCH_FROM_QUERIES:
            result = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=heads != key.shape[1]
            )
            return result.transpose(1, 2).contiguous()
        out = torch.empty((batch, length, heads, value_size), dtype=query.dtype)
        shape = _pack_shape(batch, heads, length, size, key.shape[1], keys, value_size, sliding_window or 0)
        strides = _pack_attention(
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *mask_strides(attention_mask, batch, heads)
        )
        library.attention(
            out.data_ptr(), query.data_ptr(), key.data_ptr(), value.data_ptr(),
            None if attention_mask is None else attention_mask.data_ptr(), shape, strides, scaling,
            FLOAT_CODES[query.dtype], 0 if attention_mask is None else DTYPE_CODES[attention_mask.dtype],
            threads_for(2 * batch * key.shape[1] * keys * (size + value_size)),
        )
        return out

    return call


def _is_plain_prefill(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> bool:
    keys = key.shape[2]
    return query.shape[2] == keys and (window is None or window >= keys) and query.shape[3] == value.shape[3]


def mla_attention(library: KernelLibrary) -> MlaAttention:
    """Absorbed latent attention."""

    def call(
        query_nope: torch.Tensor,
        query_rope: torch.Tensor,
        latent: torch.Tensor,
        key_rope: torch.Tensor,
        kv_b_weight: torch.Tensor,
        attention_mask: Mask,
        scaling: float,
    ) -> torch.Tensor:
        batch, heads, length, nope = query_nope.shape
        keys, size = latent.shape[2:]
        value_size = kv_b_weight.shape[0] // heads - nope
        out = torch.empty((batch, length, heads, value_size), dtype=query_nope.dtype)
        shape = _pack_shape(batch, heads, length, nope, query_rope.shape[3], keys, size, value_size)
        strides = _pack_mla(
            *query_nope.stride()[:3], *query_rope.stride()[:3], latent.stride(0), latent.stride(2), key_rope.stride(0),
            key_rope.stride(2), *mask_strides(attention_mask, batch, heads),
        )
        library.mla(
            out.data_ptr(), query_nope.data_ptr(), query_rope.data_ptr(), latent.data_ptr(), key_rope.data_ptr(),
            kv_b_weight.data_ptr(), None if attention_mask is None else attention_mask.data_ptr(), shape, strides,
            scaling, FLOAT_CODES[query_nope.dtype],
            0 if attention_mask is None else DTYPE_CODES[attention_mask.dtype], torch.get_num_threads(),
        )
        return out

    return call


def mla_expanded(library: KernelLibrary) -> MlaAttention:
    """Latent attention over keys and values expanded from the latent: cheaper where queries are many."""
    project, attend = linear(library), attention(library)

    def call(
        query_nope: torch.Tensor,
        query_rope: torch.Tensor,
        latent: torch.Tensor,
        key_rope: torch.Tensor,
        kv_b_weight: torch.Tensor,
        attention_mask: Mask,
        scaling: float,
    ) -> torch.Tensor:
        _, heads, _, nope = query_nope.shape
        expanded = project(latent[:, 0], kv_b_weight, None).unflatten(-1, (heads, -1)).transpose(1, 2)
        key = torch.cat((expanded[..., :nope], key_rope.expand(-1, heads, -1, -1)), dim=-1)
        query = torch.cat((query_nope, query_rope), dim=-1)
        return attend(query, key, expanded[..., nope:], attention_mask, scaling, None)

    return call


def mask_strides(mask: Mask, batch: int, heads: int) -> tuple[int, int, int, int]:
    """Strides of a mask [B or 1, H or 1, S, T] that repeat where a dimension is 1."""
    if mask is None:
        return _NO_MASK
    b, h, s, t = mask.stride()
    return b if mask.shape[0] == batch else 0, h if mask.shape[1] == heads else 0, s, t


def _accepts_mask(mask: Mask, batch: int, heads: int, length: int, keys: int) -> str | None:
    if mask is None:
        return None
    if not mask.is_cpu:
        return NOT_CPU
    if mask.dtype not in MASK_DTYPES:
        return "the mask is neither bool, float32 nor bfloat16"
    shape = mask.shape
    if len(shape) != 4 or shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2:] != (length, keys):
        return "the mask is not [B or 1, H or 1, S, T]"
    return None


def accepts_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask,
    scaling: float,
    sliding_window: int | None,
) -> str | None:
    """CPU tensors of one dtype, float32 or bfloat16, contiguous in the last dimension."""
    if not (query.is_cpu and key.is_cpu and value.is_cpu):
        return NOT_CPU
    dtype = query.dtype
    if dtype not in FLOAT_CODES:
        return NOT_FLOAT
    if key.dtype is not dtype or value.dtype is not dtype:
        return OTHER_DTYPE
    if query.stride(3) != 1 or key.stride(3) != 1 or value.stride(3) != 1:
        return LAST_STRIDED
    if not (query.numel() and key.numel() and value.numel()):
        return EMPTY
    (batch, heads, length, size), key_shape = query.shape, key.shape
    if key_shape[0] != batch or heads % key_shape[1] or key_shape[3] != size or value.shape[:3] != key_shape[:3]:
        return OTHER_SHAPE
    if sliding_window is not None and sliding_window < 1:
        return NO_WINDOW
    return _accepts_mask(attention_mask, batch, heads, length, key_shape[2])


def accepts_mla(
    query_nope: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    kv_b_weight: torch.Tensor,
    attention_mask: Mask,
    scaling: float,
) -> str | None:
    """CPU tensors of one dtype, float32 or bfloat16, contiguous in the last dimension; the weight contiguous."""
    together = (query_nope, query_rope, latent, key_rope, kv_b_weight)
    dtype = query_nope.dtype
    if dtype not in FLOAT_CODES:
        return NOT_FLOAT
    for tensor in together:
        if not tensor.is_cpu:
            return NOT_CPU
        if tensor.dtype is not dtype:
            return OTHER_DTYPE
        if tensor.stride(-1) != 1:
            return LAST_STRIDED
        if not tensor.numel():
            return EMPTY
    if not kv_b_weight.is_contiguous():
        return NOT_CONTIGUOUS
    (batch, heads, length, nope), (rows, size) = query_nope.shape, kv_b_weight.shape
    keys, rope = latent.shape[2], query_rope.shape[3]
    if query_rope.shape[:3] != (batch, heads, length) or rows % heads or rows <= heads * nope:
        return OTHER_SHAPE
    if latent.shape != (batch, 1, keys, size) or key_rope.shape != (batch, 1, keys, rope):
        return OTHER_SHAPE
    return _accepts_mask(attention_mask, batch, heads, length, keys)
