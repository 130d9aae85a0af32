"""Softmax attention by torch_npu: the inference operator for half precision, the training one for float32."""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.attention_calls import Attention, fused_inference, fusion
from porter.kernels.ascend.attention_packed import packed, variable_length
from porter.kernels.ascend.catalogue.attention_rules import PACKED_SIZES
from porter.kernels.ascend.dry_run import Kernel


def attend(torch_npu: Any, attention: Attention) -> torch.Tensor:
    """[B, S, Hq, Dv] by the operator that takes these tensors."""
    if attention.query.dtype == torch.float32:
        return fusion(torch_npu, attention)
    return fused_inference(torch_npu, attention)[0]


def gqa(
    torch_npu: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """npu_fused_infer_attention_score, and npu_fusion_attention_v3 in float32."""
    if query.numel() == 0:
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    return attend(torch_npu, Attention(query, key, value, attention_mask, scaling, sliding_window))


def sink(
    torch_npu: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """The operators' own sinks where they take this call; else the attention without sinks, times the share of the
    weights that the sink leaves: 1 / (1 + exp(sink - log of the sum of exponentials))."""
    if query.numel() == 0:
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    attention = Attention(query, key, value, attention_mask, scaling, sliding_window)
    if query.dtype == torch.float32:
        return fusion(torch_npu, attention, sinks.float())
    sizes = query.shape[-1], value.shape[-1]
    packs = query.shape[2] > 1 and attention_mask is None and sizes in PACKED_SIZES and sizes[1] <= 128
    if packs and sinks.dtype == torch.bfloat16:
        return packed(torch_npu, attention, learnable_sink=sinks)
    output, lse = fused_inference(torch_npu, attention, lse=True)
    share = torch.sigmoid(lse.transpose(1, 2) - sinks.float()[:, None])
    return (output.float() * share).to(output.dtype)


KERNELS: dict[tuple[str, str], Kernel] = {
    ("attention", "gqa"): gqa,
    ("attention", "sink"): sink,
    ("attention", "variable_length"): variable_length,
}
