"""q(x), k(x), v(x), rope, softmax(q k) v -> qkv(x), rope, attention, with or without q and k norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from porter.kernels.dispatch import OpCall
from porter.models.linear import Linear
from porter.models.rewrite import Candidate, Fusion, Mismatch

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class _Attributes(nn.Module):
    qkv_proj: Linear
    o_proj: Linear
    q_norm: nn.Module
    k_norm: nn.Module
    rope: OpCall
    attention: OpCall
    qkv_sizes: list[int]
    head_dim: int
    layer_idx: int
    scaling: float
    sliding_window: int | None


class AttentionForward(_Attributes):
    """The ported forward, copied into the generated class."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = self.qkv_proj(hidden_states).split_with_sizes(self.qkv_sizes, dim=-1)
        query, key = query.view(shape).transpose(1, 2), key.view(shape).transpose(1, 2)
        value = value.view(shape).transpose(1, 2)
        query, key = self.rope(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
        output = self.attention(query, key, value, attention_mask, self.scaling, self.sliding_window)
        return self.o_proj(output.flatten(2)), None


class NormedAttentionForward(_Attributes):
    """The ported forward where each head's query and key are normalised before rope (Qwen3)."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = self.qkv_proj(hidden_states).split_with_sizes(self.qkv_sizes, dim=-1)
        query, key = self.q_norm(query.view(shape)), self.k_norm(key.view(shape))
        value = value.view(shape).transpose(1, 2)
        query, key = self.rope(query.transpose(1, 2), key.transpose(1, 2), *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
        output = self.attention(query, key, value, attention_mask, self.scaling, self.sliding_window)
        return self.o_proj(output.flatten(2)), None


class GroupedQueryAttention:
    """Causal attention over grouped heads with rotary positions; sliding window where the layer has one."""

    name = "attention"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """Candidates with half and interleaved rope; None when the module has no q, k, v and o projections."""
        children = {n: m for n, m in module.named_children() if m is not None}
        if not all(isinstance(children.get(n), nn.Linear) for n in PROJECTIONS):
            return None
        missing = [a for a in ("head_dim", "layer_idx", "scaling") if not hasattr(module, a)]
        if missing:
            return Mismatch(f"q, k, v and o projections, but no attribute {', '.join(missing)}")
        norms = {"q_norm", "k_norm"} & children.keys()
        extra = children.keys() - set(PROJECTIONS) - {"q_norm", "k_norm"}
        if extra or len(norms) == 1:
            return Mismatch(f"grouped-query attention with unknown parts: {', '.join(sorted(extra or norms))}")
        window = () if hasattr(module, "sliding_window") else ("self.sliding_window = None",)
        return [
            Candidate(
                rewrite=self.name,
                forward=NormedAttentionForward if norms else AttentionForward,
                variant=f"{style} rope",
                fusions=(Fusion("qkv_proj", PROJECTIONS[:3], sizes="qkv_sizes"),),
                append=(
                    *window,
                    f'self.rope = OpCall("rope", "{style}")',
                    'self.attention = OpCall("attention", "gqa")',
                ),
            )
            for style in ("half", "interleaved")
        ]
