"""DeepSeek-V4's compressors: windows of tokens become single entries, which an indexer over entries of its own selects.

What tokens and entries a sequence has so far lives in upstream's cache layers, through their own methods.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from porter.kernels.dispatch import OpCall
from porter.models.linear import Linear
from porter.models.rewrite import Candidate, Mismatch

PARTS = frozenset({"kv_proj", "gate_proj", "kv_norm", "rotary_emb"})
READS = ("compress_rate", "head_dim", "rope_layer_type", "position_bias")
INDEXER_READS = ("index_topk", "num_heads")
SCORER_READS = ("softmax_scale", "weights_scaling")


class _Compressing(nn.Module):
    kv_proj: Linear
    gate_proj: Linear
    kv_norm: nn.Module
    rotary_emb: nn.Module
    position_bias: torch.Tensor
    compress_rate: int
    head_dim: int
    rope_layer_type: str
    compress: OpCall
    rope: OpCall

    def entries(self, hidden_states: torch.Tensor, cache_layer: Any, name: str) -> torch.Tensor:
        """[B, T, D]: every entry so far; tokens after the last whole window wait in the cache, or are left out."""
        kv, gate, first = self.kv_proj(hidden_states), self.gate_proj(hidden_states), 0
        if cache_layer is None:
            usable = kv.shape[1] // self.compress_rate * self.compress_rate
            kv, gate = kv[:, :usable], gate[:, :usable]
        else:
            kv, gate, first = cache_layer.store_compression_weights(name, kv, gate)
        windows = kv.shape[1] // self.compress_rate
        if windows == 0:
            compressed = kv.new_zeros((kv.shape[0], 0, self.head_dim))
        else:
            shape = (windows, self.compress_rate)
            compressed = self.compressed(kv.unflatten(1, shape), gate.unflatten(1, shape), cache_layer, name)
            compressed = self.kv_norm(compressed)
            positions = torch.arange(windows, device=kv.device) * self.compress_rate + first
            positions = positions.unsqueeze(0).expand(kv.shape[0], -1)
            cos, sin = self.rotary_emb(compressed, position_ids=positions, layer_type=self.rope_layer_type)
            compressed = self.rope(compressed.unsqueeze(1), cos, sin).squeeze(1)
        return compressed if cache_layer is None else cache_layer.update_compressor_states(name, compressed)

    def compressed(self, kv: torch.Tensor, gate: torch.Tensor, cache_layer: Any, name: str) -> torch.Tensor:
        return self.compress(kv, gate, self.position_bias)


class _Overlapping(_Compressing):
    def compressed(self, kv: torch.Tensor, gate: torch.Tensor, cache_layer: Any, name: str) -> torch.Tensor:
        prior = (None, None)
        if cache_layer is not None:
            last = gate[:, -1:] + self.position_bias
            prior = cache_layer.update_overlap_state(name, kv, last, self.head_dim)
        return self.compress(kv, gate, self.position_bias, *prior)


class AllEntriesForward(_Compressing):
    """The ported methods, copied into the generated class: every entry, and which queries may see it."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        q_residual: torch.Tensor,
        position_ids: torch.Tensor,
        cache: Any,
        layer_idx: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        cache_layer = cache.layers[layer_idx] if cache is not None else None
        compressed = self.entries(hidden_states, cache_layer, "compressor").unsqueeze(1)
        length, count = position_ids.shape[1], compressed.shape[2]
        if length == 1 or count == 0:
            return compressed, None
        closed = (position_ids + 1) // self.compress_rate
        unseen = torch.arange(count, device=closed.device) >= closed[:, None, :, None]
        bias = compressed.new_zeros((compressed.shape[0], 1, length, count))
        return compressed, bias.masked_fill(unseen, float("-inf"))


class SelectedEntriesForward(_Overlapping):
    """The ported methods, copied into the generated class: every entry, and which the indexer selects per query."""

    indexer: nn.Module

    def forward(
        self,
        hidden_states: torch.Tensor,
        q_residual: torch.Tensor,
        position_ids: torch.Tensor,
        cache: Any,
        layer_idx: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cache_layer = cache.layers[layer_idx] if cache is not None else None
        compressed = self.entries(hidden_states, cache_layer, "compressor").unsqueeze(1)
        selected = self.indexer(hidden_states, q_residual, position_ids, cache, layer_idx)
        batch, _, count, _ = compressed.shape
        # One place more, for selections of nothing.
        bias = compressed.new_full((batch, 1, position_ids.shape[1], count + 1), float("-inf"))
        bias.scatter_(-1, selected.masked_fill(selected < 0, count).unsqueeze(1), 0.0)
        return compressed, bias[..., :count]


class EntryIndexerForward(_Overlapping):
    """The ported methods, copied into the generated class: the best entries, -1 where too few are closed."""

    q_b_proj: Linear
    scorer: Any
    indexer: OpCall
    index_topk: int

    def forward(
        self,
        hidden_states: torch.Tensor,
        q_residual: torch.Tensor,
        position_ids: torch.Tensor,
        cache: Any,
        layer_idx: int,
    ) -> torch.Tensor:
        batch, length = hidden_states.shape[:2]
        cache_layer = cache.layers[layer_idx] if cache is not None else None
        keys = self.entries(hidden_states, cache_layer, "indexer")
        if keys.shape[1] == 0:
            return position_ids.new_zeros((batch, length, 0))
        cos, sin = self.rotary_emb(hidden_states, position_ids=position_ids, layer_type=self.rope_layer_type)
        query = self.q_b_proj(q_residual).view(batch, length, -1, self.head_dim).transpose(1, 2)
        query = self.rope(query, cos, sin).transpose(1, 2)
        closed = ((position_ids + 1) // self.compress_rate).unsqueeze(-1)
        visible = torch.arange(keys.shape[1], device=closed.device) < closed
        weights = self.scorer.weights_proj(hidden_states)
        scaling = self.scorer.softmax_scale * self.scorer.weights_scaling
        selected = self.indexer(query, keys, weights, visible, scaling, self.index_topk).long()
        return selected.masked_fill(selected >= closed, -1)


class Compressor:
    """Projections to keys and gates, a bias by position in the window, a norm, and rotary positions of its own."""

    name = "compressor"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """One candidate, by what there is beside these parts; None where they are missing."""
        children = dict(module.named_children())
        if not PARTS <= children.keys():
            return None
        missing = [a for a in READS if not hasattr(module, a)]
        if missing:
            return Mismatch(f"a compressor of keys, but no attribute {', '.join(missing)}")
        rest = frozenset(children.keys() - PARTS)
        if rest == {"q_b_proj", "scorer"}:
            missing = [a for a in INDEXER_READS if not hasattr(module, a)]
            missing += [a for a in SCORER_READS if not hasattr(children["scorer"], a)]
            scored = [n for n, _ in children["scorer"].named_children()] == ["weights_proj"]
            if missing or not scored:
                return Mismatch(f"an indexer over compressed keys, but without {', '.join(missing) or 'weights_proj'}")
            return [self._candidate(EntryIndexerForward, "indexer", "overlapped", INDEXER, "self.scorer.weights_proj")]
        if rest == {"indexer"}:
            return [self._candidate(SelectedEntriesForward, "selected entries", "overlapped")]
        if not rest:
            return [self._candidate(AllEntriesForward, "all entries", "windowed")]
        return Mismatch(f"a compressor of keys with unknown parts: {', '.join(sorted(rest))}")

    def _candidate(self, forward: type[nn.Module], variant: str, op: str, line: str = "", kept: str = "") -> Candidate:
        projections = ["self.kv_proj", "self.gate_proj", *filter(None, [kept])]
        return Candidate(
            rewrite=self.name,
            forward=forward,
            variant=variant,
            append=(
                f'self.compress = OpCall("compressor", "{op}")',
                'self.rope = OpCall("rope", "trailing")',
                *filter(None, [line]),
                # Their errors would last as long as the sequence; released int8 and fp8 checkpoints keep them too.
                *(f"{each}.keeps_dtype = True" for each in projections),
            ),
        )


INDEXER = 'self.indexer = OpCall("indexer", "lightning")'
