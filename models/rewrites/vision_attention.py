"""Attention of vision towers over the patches of several images at once: one Op call for all segments."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from porter.kernels.dispatch import OpCall
from porter.models.linear import Linear
from porter.models.rewrite import Candidate, Mismatch

NEEDED = ("cu_seqlens", "position_embeddings")


class VisionAttentionForward(nn.Module):
    """The ported forward, copied into the generated class."""

    qkv: Linear
    proj: Linear
    rope: OpCall
    attention: OpCall
    num_heads: int
    scaling: float

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **kwargs: Any,
    ) -> torch.Tensor:
        query, key, value = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)
        cos, sin = position_embeddings
        query, key = self.rope(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos[None], sin[None])
        query, key = query[0].transpose(0, 1), key[0].transpose(0, 1)
        return self.proj(self.attention(query, key, value, cu_seqlens, self.scaling).flatten(-2))


class VisionAttention:
    """A linear to queries, keys and values together, one to the output, and segments given by `cu_seqlens`."""

    name = "vision_attention"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """One candidate; None when the module's forward takes no `cu_seqlens` or it has no fused projection."""
        if "cu_seqlens" not in inspect.signature(module.forward).parameters:
            return None
        linears = {n: m for n, m in module.named_children() if isinstance(m, nn.Linear)}
        fused = [n for n, m in linears.items() if m.out_features == 3 * m.in_features]
        if not linears:
            return None
        output = [n for n, m in linears.items() if m.out_features == m.in_features]
        if len(fused) != 1 or len(output) != 1 or len(dict(module.named_children())) != 2:
            parts = ", ".join(n for n, _ in module.named_children())
            return Mismatch(f"attention over segments, but not of one projection to q, k and v and one output: {parts}")
        missing = [n for n in NEEDED if n not in inspect.signature(module.forward).parameters]
        missing += [n for n in ("num_heads", "scaling") if not hasattr(module, n)]
        if missing:
            return Mismatch(f"attention over segments, but without {', '.join(missing)}")
        return [
            Candidate(
                rewrite=self.name,
                forward=VisionAttentionForward,
                variant="half rope, variable length",
                rename={"qkv": fused[0], "proj": output[0]},
                append=(
                    'self.rope = OpCall("rope", "half")',
                    'self.attention = OpCall("attention", "variable_length")',
                ),
            )
        ]
