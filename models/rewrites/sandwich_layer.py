"""x + norm(attention(norm(x))), then the same with an MLP -> the first sum and the norm after it in one Op."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from porter.models.rewrite import Candidate, Mismatch

NORMS = (
    ("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
"""What layers call the norms behind attention, before the MLP and behind it: GLM-4, and Gemma 2 and 3."""


class SandwichLayerForward(nn.Module):
    """The ported forward, copied into the generated class."""

    input_layernorm: nn.Module
    self_attn: nn.Module
    norm_behind_attention: nn.Module
    norm_before_mlp: nn.Module
    mlp: nn.Module
    norm_behind_mlp: nn.Module

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        attention_output, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        normed, residual = self.norm_before_mlp(self.norm_behind_attention(attention_output), hidden_states)
        return residual + self.norm_behind_mlp(self.mlp(normed))


class SandwichLayer:
    """Two residual blocks with a norm on either side of attention and of the MLP."""

    name = "decoder_layer"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """One candidate; None when the module has other parts."""
        children = set(dict(module.named_children()))
        names = next((n for n in NORMS if children == {"input_layernorm", "self_attn", "mlp", *n}), None)
        if names is None:
            return None
        return [
            Candidate(
                rewrite=self.name,
                forward=SandwichLayerForward,
                variant="norms on either side",
                rename=dict(zip(("norm_behind_attention", "norm_before_mlp", "norm_behind_mlp"), names, strict=True)),
                needs_ported=(names[1],),
            )
        ]
