"""x + attention(norm(x)), then norm of the sum -> the sum and its norm in one Op."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from porter.models.rewrite import Candidate, Mismatch

PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


class _Attributes(nn.Module):
    input_layernorm: nn.Module
    self_attn: nn.Module
    post_attention_layernorm: nn.Module
    mlp: nn.Module


class DecoderLayerForward(_Attributes):
    """The ported forward, copied into the generated class."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        attention_output, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        normed, residual = self.post_attention_layernorm(attention_output, hidden_states)
        return residual + self.mlp(normed)


class SelectingLayerForward(_Attributes):
    """As DecoderLayerForward, for attention that hands the keys it selected on to the next layer (GLM-MoE-DSA)."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attention_output, _, selected = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        normed, residual = self.post_attention_layernorm(attention_output, hidden_states)
        return residual + self.mlp(normed), selected


class DecoderLayer:
    """Two pre-norm residual blocks: attention, then an MLP or a mixture of experts."""

    name = "decoder_layer"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """One candidate; None when the module has no attention and MLP of its own."""
        children = dict(module.named_children())
        if not {"self_attn", "mlp"} <= children.keys():
            return None
        if set(children) != set(PARTS):
            odd = sorted(set(children) ^ set(PARTS))
            return Mismatch(f"a decoder layer whose parts differ from {', '.join(PARTS)}: {', '.join(odd)}")
        hands_on = hasattr(children["self_attn"], "skip_topk")
        return [
            Candidate(
                rewrite=self.name,
                forward=SelectingLayerForward if hands_on else DecoderLayerForward,
                variant="pre_norm, selection handed on" if hands_on else "pre_norm",
                needs_ported=("post_attention_layernorm",),
            )
        ]
