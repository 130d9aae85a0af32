"""Attention with a sink on the CPU: over a key-value cache read in place, one query or many."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

import torch

from porter.kernels.cpu.attention import Mask, accepts_attention, mask_strides
from porter.kernels.cpu.layout import FLOAT_CODES, NOT_CPU, NOT_FLOAT, OTHER_SHAPE, threads_for
from porter.kernels.cpu.library import DTYPE_CODES, KernelLibrary

SinkAttention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Mask, float, "int | None"], torch.Tensor
]

_pack_shape = Struct("8q").pack
_pack_strides = Struct("13q").pack


def sink_attention(library: KernelLibrary) -> SinkAttention:
    """Grouped-query attention whose running sum begins with the sink."""

    def call(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor,
        attention_mask: Mask,
        scaling: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        batch, heads, length, size = query.shape
        keys, value_size = value.shape[2:]
        logits = sinks.to(torch.float32).contiguous()
        out = torch.empty((batch, length, heads, value_size), dtype=query.dtype)
        shape = _pack_shape(batch, heads, length, size, key.shape[1], keys, value_size, sliding_window or 0)
        strides = _pack_strides(
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *mask_strides(attention_mask, batch, heads)
        )
        library.sink_attention(
            out.data_ptr(), query.data_ptr(), key.data_ptr(), value.data_ptr(), logits.data_ptr(),
            None if attention_mask is None else attention_mask.data_ptr(), shape, strides, scaling,
            FLOAT_CODES[query.dtype], 0 if attention_mask is None else DTYPE_CODES[attention_mask.dtype],
            threads_for(2 * batch * key.shape[1] * keys * (size + value_size)),
        )
        return out

    return call


def accepts_sink_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    attention_mask: Mask,
    scaling: float,
    sliding_window: int | None,
) -> str | None:
    """As attention/gqa, with a sink per query head in float32 or bfloat16."""
    if not sinks.is_cpu:
        return NOT_CPU
    if sinks.dtype not in FLOAT_CODES:
        return NOT_FLOAT
    if sinks.dim() != 1 or sinks.shape[0] != query.shape[1]:
        return OTHER_SHAPE
    return accepts_attention(query, key, value, attention_mask, scaling, sliding_window)
