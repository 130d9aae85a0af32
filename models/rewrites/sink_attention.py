"""Grouped-query attention with a sink per head: as without it, but for a score that takes weight and gives no value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from porter.models.rewrite import Candidate, Mismatch
from porter.models.rewrites.attention import GroupedQueryAttention
from porter.models.rewrites.attention_forward import AttentionForward


class SinkAttentionForward(AttentionForward):
    """The ported methods, copied into the generated class."""

    sinks: torch.Tensor

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
        cos, sin = position_embeddings
        if 2 * cos.shape[-1] == self.head_dim:
            # One cosine for each pair, where the Op wants one for each dimension.
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        query, key = self.rope(query, key, cos, sin)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
        output = self.attention(query, key, value, self.sinks, attention_mask, self.scaling, self.sliding_window)
        return self.o_proj(output.flatten(2)), None


class SinkAttention:
    """The attention that GroupedQueryAttention matches, beside a parameter with one number per head (gpt-oss)."""

    name = "sink_attention"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """Candidates with half rope; None when the module has no such parameter, or is no such attention."""
        own = [(n, p) for n, p in module.named_parameters(recurse=False) if p.dim() == 1]
        plain = GroupedQueryAttention().candidates(module) if len(own) == 1 else None
        if not isinstance(plain, list):
            return plain
        ((name, sinks),) = own
        fitting = [c for c in plain if c.forward is AttentionForward]
        head_dim = getattr(module, "head_dim", None)
        width = module.get_submodule(plain[0].fusions[0].sources[0]).out_features
        if not fitting or not isinstance(head_dim, int) or width != sinks.numel() * head_dim:
            return Mismatch(f"attention with a parameter {name} that is no sink per head, or with norms beside sinks")
        return [
            replace(
                candidate,
                rewrite=self.name,
                forward=SinkAttentionForward,
                variant=f"{candidate.variant}, sinks",
                rename={**candidate.rename, **({} if name == "sinks" else {"sinks": name})},
                append=tuple(line.replace('"attention", "gqa"', '"attention", "sink"') for line in candidate.append),
            )
            for candidate in fitting
        ]
