"""The vendor's attention operators, called with padded queries, keys and values in dense layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from porter.kernels.ascend.attention_masks import (
    as_bias,
    compressed_mask,
    hidden,
    up_to,
    whole_cache,
    without_keys,
)
from porter.kernels.ascend.catalogue.attention_layouts import UNLIMITED


@dataclass(frozen=True)
class Attention:
    """The arguments of attention/gqa: query [B, Hq, S, D], key [B, Hk, T, D], value [B, Hk, T, Dv]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    scaling: float
    window: int | None


def causal(attention: Attention) -> dict[str, Any]:
    """The arguments that hide later keys, and those before the window, from more than one query."""
    limits = {"sparse_mode": 3, "pre_tokens": UNLIMITED, "next_tokens": UNLIMITED}
    if attention.window is not None:
        limits = {"sparse_mode": 4, "pre_tokens": attention.window - 1, "next_tokens": 0}
    return {"atten_mask": compressed_mask(attention.query.device), "inner_precise": 0, **limits}


def fused_inference(torch_npu: Any, attention: Attention, lse: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """([B, S, Hq, Dv], the logarithm of the sum of exponentials [B, Hq, S, 1] or nothing)."""
    if attention.query.shape[2] == 1:
        return _decode(torch_npu, attention, lse)
    query, key, value = _padded(attention)
    mask, scaling, extra = attention.mask, attention.scaling, causal(attention)
    if mask is not None:
        extra = {"sparse_mode": 0, "pre_tokens": UNLIMITED, "next_tokens": UNLIMITED}
        if mask.dtype == torch.bool and mask.shape[1] == 1:
            extra |= {"atten_mask": hidden(mask), "inner_precise": 2}
        else:
            query, scaling, bias = _biased(query, scaling, mask)
            extra |= {"pse_shift": bias, "inner_precise": 0}
    output, sums = torch_npu.npu_fused_infer_attention_score(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        num_heads=query.shape[1],
        num_key_value_heads=key.shape[1],
        scale=scaling,
        input_layout="BNSD_BSND",
        softmax_lse_flag=lse,
        **extra,
    )
    return _finished(output, attention, "pse_shift" in extra), sums


def _decode(torch_npu: Any, attention: Attention, lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """One query. The operator reads neither sparse_mode nor, beyond key 512, a mask then: a window is cut out of the
    keys, and a mask is added to the scores."""
    attention = _last_keys(attention)
    query, key, value = _padded(attention)
    mask, scaling, bias, lengths = attention.mask, attention.scaling, None, None
    keys = key.shape[2]
    if (buffers := whole_cache(key, value)) is not None:
        (key, value), lengths = buffers, [keys]
    if mask is not None:
        query, scaling, bias = _biased(query, scaling, functional.pad(mask, (0, key.shape[2] - keys)))
    output, sums = torch_npu.npu_fused_infer_attention_score(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        pse_shift=bias,
        actual_seq_lengths_kv=lengths,
        num_heads=query.shape[1],
        num_key_value_heads=key.shape[1],
        scale=scaling,
        input_layout="BNSD",
        sparse_mode=0,
        inner_precise=0,
        softmax_lse_flag=lse,
    )
    return _finished(output.transpose(1, 2), attention, mask is not None), sums


def _last_keys(attention: Attention) -> Attention:
    window = attention.window
    if attention.mask is not None or window is None or window >= attention.key.shape[2]:
        return attention
    return replace(attention, key=attention.key[:, :, -window:], value=attention.value[:, :, -window:])


def _padded(attention: Attention) -> list[torch.Tensor]:
    """Query, key and value of one head size, a multiple of 16: zeros change neither scores nor the values kept."""
    size = -(-max(attention.query.shape[-1], attention.value.shape[-1]) // 16) * 16
    return up_to(size, attention.query, attention.key, attention.value)


def _biased(query: torch.Tensor, scaling: float, mask: torch.Tensor) -> tuple[torch.Tensor, float, torch.Tensor]:
    """(query, scale, bias) of a mask that is added to the scores. The documents disagree whether before or after they
    are scaled, so an additive mask goes with a query that is scaled already; a bool one hides keys either way."""
    bias = as_bias(mask, query.shape[1], query.dtype)
    if mask.dtype == torch.bool:
        return query, scaling, bias
    return (query.float() * scaling).to(query.dtype), 1.0, bias


def _finished(output: torch.Tensor, attention: Attention, biased: bool) -> torch.Tensor:
    """[B, S, Hq, Dv] without padding; a bias gives a query without keys the mean of the values, where zeros belong."""
    output = output[..., : attention.value.shape[-1]]
    if biased and attention.mask is not None:
        output = output.masked_fill(without_keys(attention.mask), 0.0)
    return output.contiguous()


def fusion(torch_npu: Any, attention: Attention, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """[B, S, Hq, Dv] by the training operator, which takes any head size and float32."""
    attention = _last_keys(attention) if attention.query.shape[2] == 1 else attention
    query, key = attention.query, attention.key
    if attention.value.shape[-1] > query.shape[-1]:
        query, key = up_to(attention.value.shape[-1], query, key)
    mask, scaling = attention.mask, attention.scaling
    extra: dict[str, Any] = {"sparse_mode": 0, "inner_precise": 0}
    if mask is None and query.shape[2] > 1:
        limits = causal(attention)
        extra = {"pre_tockens": limits.pop("pre_tokens"), "next_tockens": limits.pop("next_tokens"), **limits}
    elif mask is not None and mask.dtype == torch.bool:
        extra |= {"atten_mask": hidden(_all_sequences(mask, query.shape[0])), "inner_precise": 2}
    elif mask is not None:
        query, scaling, extra["pse"] = _biased(query, scaling, mask)
    output = torch_npu.npu_fusion_attention_v3(
        query, key, attention.value, query.shape[1], "BNSD", scale=scaling, sink=sinks, **extra
    )[0]
    return _finished(output.transpose(1, 2), attention, "pse" in extra)


def _all_sequences(mask: torch.Tensor, batch: int) -> torch.Tensor:
    """A mask for every sequence where it differs by head: one for all sequences is taken for one head only."""
    return mask if mask.shape[1] == 1 else mask.expand(batch, -1, -1, -1)
