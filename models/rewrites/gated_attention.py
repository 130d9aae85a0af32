"""Attention whose q_proj also gives a gate per head: output * sigmoid(gate) before o_proj."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from porter.kernels.dispatch import OpCall
from porter.models.linear import Linear
from porter.models.rewrite import Candidate, Fusion, Mismatch

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMS = ("q_norm", "k_norm")


class GatedAttentionForward(nn.Module):
    """The ported forward, copied into the generated class."""

    qkv_proj: Linear
    o_proj: Linear
    q_norm: nn.Module
    k_norm: nn.Module
    rope: OpCall
    attention: OpCall
    sigmoid_gate: OpCall
    qkv_sizes: list[int]
    head_dim: int
    layer_idx: int
    scaling: float

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
        query, gate = query.view(*shape[:-1], 2 * self.head_dim).chunk(2, dim=-1)
        query, key = self.q_norm(query), self.k_norm(key.view(shape))
        value = value.view(shape).transpose(1, 2)
        query, key = self.rope(query.transpose(1, 2), key.transpose(1, 2), *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
        output = self.attention(query, key, value, attention_mask, self.scaling, None)
        return self.o_proj(self.sigmoid_gate(output, gate).flatten(2)), None


class GatedAttention:
    """Grouped-query attention with normalised heads, and a query projection twice as wide as the output's input."""

    name = "gated_attention"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """Candidates with half and interleaved rope; None when q_proj gives queries alone."""
        children = {n: m for n, m in module.named_children() if m is not None}
        linears = [children.get(n) for n in PROJECTIONS]
        query, output = linears[0], linears[3]
        if not (isinstance(query, nn.Linear) and isinstance(output, nn.Linear)):
            return None
        if query.out_features != 2 * output.in_features or not all(isinstance(m, nn.Linear) for m in linears):
            return None
        missing = [a for a in ("head_dim", "layer_idx", "scaling") if not hasattr(module, a)]
        if missing:
            return Mismatch(f"attention with an output gate, but no attribute {', '.join(missing)}")
        odd = sorted(children.keys() ^ {*PROJECTIONS, *NORMS})
        if odd:
            return Mismatch(f"attention with an output gate whose parts differ: {', '.join(odd)}")
        if getattr(module, "sliding_window", None) is not None:
            return Mismatch("attention with an output gate and a sliding window")
        return [
            Candidate(
                rewrite=self.name,
                forward=GatedAttentionForward,
                variant=f"{style} rope",
                fusions=(Fusion("qkv_proj", PROJECTIONS[:3], sizes="qkv_sizes"),),
                append=(
                    f'self.rope = OpCall("rope", "{style}")',
                    'self.attention = OpCall("attention", "gqa")',
                    'self.sigmoid_gate = OpCall("sigmoid_gate", "standard")',
                ),
            )
            for style in ("half", "interleaved")
        ]
