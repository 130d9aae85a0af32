"""Attention over sequences one after another, without padding."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from porter.kernels.ascend.attention_calls import Attention, causal
from porter.kernels.ascend.attention_masks import up_to


class BoundsOnHost:
    """The bounds of the sequences on the CPU, where the operator reads them.

    Every layer of a vision tower gets the same tensors, so they are remembered while they live: the device is waited
    for once a forward, not once a layer.
    """

    def __init__(self) -> None:
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __call__(self, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """The ends of the sequences, int64 on the CPU; as many without values where `cu_seqlens` has none."""
        if cu_seqlens.is_meta:
            return torch.empty(cu_seqlens.shape[0] - 1, dtype=torch.int64, device="meta")
        if cu_seqlens.is_inference():  # Such tensors do not tell whether they were written since.
            return _ends(cu_seqlens)
        known: tuple[int, torch.Tensor] | None = self._known.get(cu_seqlens)
        if known is None or known[0] != cu_seqlens._version:
            known = cu_seqlens._version, _ends(cu_seqlens)
            self._known[cu_seqlens] = known
        return known[1]


def _ends(cu_seqlens: torch.Tensor) -> torch.Tensor:
    return cu_seqlens[1:].to(device="cpu", dtype=torch.int64, copy=True)


BOUNDS = BoundsOnHost()


def variable_length(
    torch_npu: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """npu_fusion_attention_v3 in layout TND without a mask: the inference operator gives plain means there
    (vllm-ascend issue 13699)."""
    if query.numel() == 0:
        return query.new_empty(*query.shape[:2], value.shape[2])
    ends, size = BOUNDS(cu_seqlens), value.shape[2]
    if size > query.shape[2]:
        query, key = up_to(size, query, key)
    output: torch.Tensor = torch_npu.npu_fusion_attention_v3(
        query,
        key,
        value,
        query.shape[1],
        "TND",
        scale=scaling,
        sparse_mode=0,
        actual_seq_qlen=ends,
        actual_seq_kvlen=ends,
    )[0]
    return output


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """[B, N, S, D] as [B * S, N, D], contiguous."""
    return tensor.transpose(1, 2).flatten(0, 1).contiguous()


def ends_of(tensor: torch.Tensor) -> list[int]:
    """Prefix sums of the B sequences of [B, N, S, D]."""
    return [tensor.shape[2] * (i + 1) for i in range(tensor.shape[0])]


def packed(torch_npu: Any, attention: Attention, **others: torch.Tensor) -> torch.Tensor:
    """[B, S, Hq, Dv] by npu_fused_infer_attention_score_v2 in layout TND, the one in which it takes sinks, and rope
    beside expanded keys; `others` are such arguments."""
    query, key = attention.query, attention.key
    output: torch.Tensor = torch_npu.npu_fused_infer_attention_score_v2(
        rows(query),
        rows(key),
        rows(attention.value),
        actual_seq_qlen=ends_of(query),
        actual_seq_kvlen=ends_of(key),
        num_query_heads=query.shape[1],
        num_key_value_heads=key.shape[1],
        softmax_scale=attention.scaling,
        input_layout="TND",
        **causal(attention),
        **others,
    )[0]
    return output.view(query.shape[0], query.shape[2], *output.shape[1:])
