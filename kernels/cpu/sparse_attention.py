"""DeepSeek sparse attention on the CPU: the lightning indexer, and latent attention over the keys that it selected."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

import torch

from porter.kernels.cpu.attention import LAST_STRIDED, MASK_DTYPES, Mask, mask_strides
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

Indexer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Mask, float, int], torch.Tensor]
SparseMlaAttention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Mask, float], torch.Tensor
]

MASK_SHAPE = "the mask is not [B or 1, S, T]"
HEAD_MASK = "the mask is not [B or 1, 1, S, T]"

_pack_index_shape = Struct("6q").pack
_pack_index_strides = Struct("10q").pack
_pack_shape = Struct("9q").pack
_pack_strides = Struct("13q").pack


def indexer(library: KernelLibrary) -> Indexer:
    """Scores in float32 and the keys of the best, earlier ones first where scores are equal."""

    def call(
        query: torch.Tensor,
        key: torch.Tensor,
        weights: torch.Tensor,
        attention_mask: Mask,
        scaling: float,
        top_k: int,
    ) -> torch.Tensor:
        batch, length, heads, size = query.shape
        keys = key.shape[1]
        taken = min(top_k, keys)
        out = torch.empty((batch, length, taken), dtype=torch.int32)
        mask = (0, 0, 0) if attention_mask is None else attention_mask.stride()
        shape = _pack_index_shape(batch, length, heads, size, keys, taken)
        strides = _pack_index_strides(
            *query.stride()[:3], *key.stride()[:2], *weights.stride()[:2],
            mask[0] if attention_mask is not None and attention_mask.shape[0] == batch else 0, *mask[1:],
        )
        library.indexer(
            out.data_ptr(), query.data_ptr(), key.data_ptr(), weights.data_ptr(),
            None if attention_mask is None else attention_mask.data_ptr(), shape, strides, scaling,
            FLOAT_CODES[query.dtype], FLOAT_CODES[weights.dtype],
            0 if attention_mask is None else DTYPE_CODES[attention_mask.dtype],
            threads_for(4 * batch * length * keys * size),
        )
        return out

    return call


def sparse_mla_attention(library: KernelLibrary) -> SparseMlaAttention:
    """Absorbed latent attention over gathered latents."""

    def call(
        query_nope: torch.Tensor,
        query_rope: torch.Tensor,
        latent: torch.Tensor,
        key_rope: torch.Tensor,
        kv_b_weight: torch.Tensor,
        indices: torch.Tensor,
        attention_mask: Mask,
        scaling: float,
    ) -> torch.Tensor:
        batch, heads, length, nope = query_nope.shape
        keys, size = latent.shape[2:]
        value_size = kv_b_weight.shape[0] // heads - nope
        out = torch.empty((batch, length, heads, value_size), dtype=query_nope.dtype)
        if indices.numel() and (last := int(indices.max())) >= keys:
            raise IndexError(f"key {last} is selected of a cache of {keys}")
        # Any negative index leaves its place empty, and one below int32 must not come out as a key.
        chosen = indices.clamp_min(-1).to(torch.int32).contiguous()
        shape = _pack_shape(
            batch, heads, length, nope, query_rope.shape[3], keys, size, value_size, indices.shape[2]
        )
        per_batch, _, per_query, per_key = mask_strides(attention_mask, batch, heads)
        strides = _pack_strides(
            *query_nope.stride()[:3], *query_rope.stride()[:3], latent.stride(0), latent.stride(2), key_rope.stride(0),
            key_rope.stride(2), per_batch, per_query, per_key,
        )
        library.sparse_mla(
            out.data_ptr(), query_nope.data_ptr(), query_rope.data_ptr(), latent.data_ptr(), key_rope.data_ptr(),
            kv_b_weight.data_ptr(), chosen.data_ptr(),
            None if attention_mask is None else attention_mask.data_ptr(), shape, strides, scaling,
            FLOAT_CODES[query_nope.dtype], 0 if attention_mask is None else DTYPE_CODES[attention_mask.dtype],
            torch.get_num_threads(),
        )
        return out

    return call


def accepts_indexer(
    query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, attention_mask: Mask, scaling: float, top_k: int
) -> str | None:
    """float32 or bfloat16 on the CPU, contiguous in the last dimension; the weights may be of the other dtype."""
    if not (query.is_cpu and key.is_cpu and weights.is_cpu):
        return NOT_CPU
    if query.dtype not in FLOAT_CODES or weights.dtype not in FLOAT_CODES:
        return NOT_FLOAT
    if key.dtype is not query.dtype:
        return OTHER_DTYPE
    if query.stride(3) != 1 or key.stride(2) != 1 or weights.stride(2) != 1:
        return LAST_STRIDED
    if not (query.numel() and key.numel()):
        return EMPTY
    batch, length, heads, size = query.shape
    if key.shape != (batch, key.shape[1], size) or weights.shape != (batch, length, heads) or top_k < 1:
        return OTHER_SHAPE
    return _accepts_mask(attention_mask, ((batch, length, key.shape[1]), (1, length, key.shape[1])), MASK_SHAPE)


def accepts_sparse_mla(
    query_nope: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    kv_b_weight: torch.Tensor,
    indices: torch.Tensor,
    attention_mask: Mask,
    scaling: float,
) -> str | None:
    """As mla_attention, with integer indices on the CPU and a mask that all heads share."""
    dtype = query_nope.dtype
    if dtype not in FLOAT_CODES:
        return NOT_FLOAT
    for tensor in (query_nope, query_rope, latent, key_rope, kv_b_weight):
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
    if not indices.is_cpu:
        return NOT_CPU
    (batch, heads, length, nope), (rows, size) = query_nope.shape, kv_b_weight.shape
    keys, rope = latent.shape[2], query_rope.shape[3]
    if query_rope.shape[:3] != (batch, heads, length) or rows % heads or rows <= heads * nope:
        return OTHER_SHAPE
    if latent.shape != (batch, 1, keys, size) or key_rope.shape != (batch, 1, keys, rope):
        return OTHER_SHAPE
    if indices.shape[:2] != (batch, length) or indices.dim() != 3 or indices.dtype not in (torch.int32, torch.int64):
        return OTHER_SHAPE
    return _accepts_mask(attention_mask, ((batch, 1, length, keys), (1, 1, length, keys)), HEAD_MASK)


def _accepts_mask(mask: Mask, shapes: tuple[tuple[int, ...], ...], wanted: str) -> str | None:
    if mask is None:
        return None
    if not mask.is_cpu:
        return NOT_CPU
    if mask.dtype not in MASK_DTYPES:
        return "the mask is neither bool, float32 nor bfloat16"
    return None if tuple(mask.shape) in shapes else wanted
