"""The ported forwards of grouped-query attention: where its norms stand and how its positions turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from porter.kernels.dispatch import OpCall
from porter.models.linear import Linear


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


class PartlyTurnedForward(_Attributes):
    """The ported forward where neighbours turn, and those past the cosines' width stay (GLM-4)."""

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
        # The Op turns every dimension that it is given; which of the turned ones comes first, scores do not see.
        turned = position_embeddings[0].shape[-1]
        query_turned, key_turned = self.rope(query[..., :turned], key[..., :turned], *position_embeddings)
        query = torch.cat([query_turned, query[..., turned:]], dim=-1)
        key = torch.cat([key_turned, key[..., turned:]], dim=-1)
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


class TurnedThenNormedForward(_Attributes):
    """The ported forward where each head's query and key are normalised after rope (Hunyuan)."""

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
        query, key = self.q_norm(query), self.k_norm(key)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
        output = self.attention(query, key, value, attention_mask, self.scaling, self.sliding_window)
        return self.o_proj(output.flatten(2)), None


class WidelyNormedForward(_Attributes):
    """The ported forward where query and key are normalised over all heads at once (MiniMax-M2, OLMoE)."""

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
        query, key = self.q_norm(query).view(shape), self.k_norm(key).view(shape)
        value = value.view(shape).transpose(1, 2)
        query, key = self.rope(query.transpose(1, 2), key.transpose(1, 2), *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
        output = self.attention(query, key, value, attention_mask, self.scaling, self.sliding_window)
        return self.o_proj(output.flatten(2)), None


Variant = tuple[str, str, type[nn.Module]]
VARIANTS: Mapping[str, tuple[Variant, ...]] = {
    "none": (
        ("half", "half rope", AttentionForward),
        ("interleaved", "interleaved rope", PartlyTurnedForward),
    ),
    "per head": (
        ("half", "half rope", NormedAttentionForward),
        ("half", "half rope, then norms", TurnedThenNormedForward),
        ("interleaved", "interleaved rope", NormedAttentionForward),
    ),
    "wide": (
        ("half", "half rope, wide norms", WidelyNormedForward),
        ("interleaved", "interleaved rope, wide norms", WidelyNormedForward),
    ),
}
"""(rope Op, words, forward) in the order in which they are tried, by what query and key norms there are."""
