"""DeepSeek-V4's attention: one key head that is its own value, sinks, and compressed keys behind a sliding window."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from porter.kernels.dispatch import OpCall
from porter.models.linear import Linear
from porter.models.rewrite import Candidate, Mismatch

PARTS = frozenset({"q_a_proj", "q_a_norm", "q_b_proj", "q_b_norm", "kv_proj", "kv_norm", "o_a_proj", "o_b_proj"})
READS = ("rope_layer_type", "head_dim", "layer_idx", "scaling", "sliding_window", "compressor")


class SharedKVForward(nn.Module):
    """The ported methods, copied into the generated class.

    Values are keys, which rope has turned: turning the output back at the query's position leaves the contribution of
    each key a function of its distance.
    """

    q_a_proj: Linear
    q_a_norm: nn.Module
    q_b_proj: Linear
    q_b_norm: nn.Module
    kv_proj: Linear
    kv_norm: nn.Module
    o_a_proj: nn.Module
    o_b_proj: Linear
    compressor: nn.Module | None
    sinks: torch.Tensor
    rope: OpCall
    attention: OpCall
    rope_layer_type: str
    head_dim: int
    layer_idx: int
    scaling: float
    sliding_window: int

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]],
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        shape = hidden_states.shape[:-1]
        cos, sin = position_embeddings[self.rope_layer_type]
        query_residual = self.q_a_norm(self.q_a_proj(hidden_states))
        query = self.q_b_norm(self.q_b_proj(query_residual).view(*shape, -1, self.head_dim).transpose(1, 2))
        query = self.rope(query, cos, sin)
        key = self.rope(self.kv_norm(self.kv_proj(hidden_states)).unsqueeze(1), cos, sin)
        if cache is not None:
            key = cache.update(key, key, self.layer_idx, kwargs=kwargs)[0]
        if attention_mask is None:
            attention_mask = key.new_zeros((1, 1, shape[1], key.shape[2]))
        if self.compressor is not None:
            entries, bias = self.compressor(hidden_states, query_residual, position_ids, cache, self.layer_idx)
            key, attention_mask = self.joined(key, attention_mask, entries, bias)
        output = self.attention(query, key, key, self.sinks, attention_mask, self.scaling, self.sliding_window)
        output = self.rope(output.transpose(1, 2), cos, -sin).transpose(1, 2)
        grouped = self.o_a_proj(output.reshape(*shape, self.o_a_proj.n_groups, -1)).flatten(2)
        return self.o_b_proj(grouped), None

    def joined(
        self, key: torch.Tensor, mask: torch.Tensor, entries: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and mask with the compressed entries behind; a single query reads only the entries selected for it."""
        count = entries.shape[2]
        if bias is None:
            return torch.cat((key, entries), dim=2), nn.functional.pad(mask, (0, count))
        selects = getattr(getattr(self.compressor, "indexer", None), "index_topk", count)
        if bias.shape[2] == 1 and selects < count:
            bias, chosen = bias.topk(selects, dim=-1)
            entries = entries.gather(2, chosen.transpose(2, 3).expand(-1, -1, -1, entries.shape[3]))
        batch = max(mask.shape[0], bias.shape[0])
        mask = torch.cat((mask.expand(batch, -1, -1, -1), bias.to(mask.dtype).expand(batch, -1, -1, -1)), dim=-1)
        return torch.cat((key, entries), dim=2), mask


class SharedKVAttention:
    """Low-rank queries, one head of keys that are the values, a sink per head, a grouped low-rank output."""

    name = "shared_kv_attention"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """One candidate; None when the module has no such projections."""
        children = dict(module.named_children())
        if not {"q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj"} <= children.keys():
            return None
        odd = (PARTS ^ children.keys()) - {"compressor"}
        if odd:
            return Mismatch(f"shared-KV attention whose parts differ from {', '.join(sorted(PARTS))}: {', '.join(odd)}")
        missing = [a for a in READS if not hasattr(module, a)]
        if missing or not hasattr(children["o_a_proj"], "n_groups"):
            return Mismatch(f"shared-KV attention, but no attribute {', '.join(missing) or 'o_a_proj.n_groups'}")
        own = {n: p.dim() for n, p in module.named_parameters(recurse=False)}
        if own != {"sinks": 1}:
            return Mismatch(f"shared-KV attention with parameters {', '.join(own) or 'none'} instead of one of sinks")
        return [
            Candidate(
                rewrite=self.name,
                forward=SharedKVForward,
                variant="sinks, compressed keys",
                append=(
                    'self.rope = OpCall("rope", "trailing")',
                    'self.attention = OpCall("attention", "sink")',
                ),
            )
        ]
