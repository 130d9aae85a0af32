"""A decoder layer that mixes tokens by attention or by a recurrent state, depending on where it stands."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from porter.models.rewrite import Candidate, Mismatch

MIXERS = ("linear_attn", "self_attn")
PARTS = frozenset({"input_layernorm", "post_attention_layernorm", "mlp"})


class HybridLayerForward(nn.Module):
    """The ported forward, copied into the generated class."""

    input_layernorm: nn.Module
    linear_attn: nn.Module
    self_attn: nn.Module
    post_attention_layernorm: nn.Module
    mlp: nn.Module
    mixes_by_state: bool

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states)
        if self.mixes_by_state:
            mixed = self.linear_attn(hidden_states=normed, cache=cache, attention_mask=attention_mask, **kwargs)
        else:
            mixed, _ = self.self_attn(
                hidden_states=normed,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                position_embeddings=position_embeddings,
                **kwargs,
            )
        normed, residual = self.post_attention_layernorm(mixed, hidden_states)
        return residual + self.mlp(normed)


class HybridLayer:
    """Two pre-norm residual blocks: a token mixer, then an MLP or a mixture of experts."""

    name = "hybrid_layer"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """One candidate for either mixer; None when the module has neither with norms and an MLP around it."""
        children = dict(module.named_children())
        mixers = [name for name in MIXERS if name in children]
        if not mixers or "mlp" not in children:
            return None
        odd = sorted((children.keys() - set(MIXERS)) ^ PARTS)
        if odd or len(mixers) != 1:
            parts = ", ".join(odd or mixers)
            return Mismatch(f"a layer whose parts differ from one mixer, two norms and an mlp: {parts}")
        return [
            Candidate(
                rewrite=self.name,
                forward=HybridLayerForward,
                variant="attention or linear attention",
                append=(f'self.mixes_by_state = hasattr(self, "{MIXERS[0]}")',),
                needs_ported=("post_attention_layernorm",),
            )
        ]
