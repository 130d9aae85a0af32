"""DeepSeek sparse attention: an indexer with a key cache of its own selects the keys, latent attention gathers them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from porter.kernels.dispatch import OpCall
from porter.models.linear import Linear
from porter.models.rewrite import Candidate, Mismatch
from porter.models.rewrites.mla import PARTS, RANKS

INDEXER_PARTS = ("wq_b", "wk", "k_norm", "weights_proj")
INDEXER_ATTRIBUTES = ("n_heads", "head_dim", "index_topk", "softmax_scale", "layer_idx")
QUERY_PARTS = ("q_a_proj", "q_a_layernorm", "q_b_proj")


class IndexerForward(nn.Module):
    """The ported methods, copied into the generated class; rope turns the first dimensions, halves apart."""

    wq_b: Linear
    wk: Linear
    k_norm: nn.LayerNorm
    weights_proj: nn.Linear
    rope: OpCall
    indexer: OpCall
    n_heads: int
    head_dim: int
    index_topk: int
    layer_idx: int
    softmax_scale: float

    def forward(
        self,
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
    ) -> torch.Tensor:
        shape = (*hidden_states.shape[:-1], self.n_heads, self.head_dim)
        query = self.wq_b(q_resid).view(shape).transpose(1, 2)
        key = self.k_norm(self.wk(hidden_states)).unsqueeze(1)
        query, key = self.rotated(query, key, *position_embeddings)
        key = key.squeeze(1)
        if cache is not None:
            key = cache.update_indexer(key, self.layer_idx)
        # Kept in float32 where the rest is float16.
        weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype))
        scaling = self.softmax_scale * self.n_heads**-0.5
        return self.indexer(query.transpose(1, 2), key, weights, attention_mask, scaling, self.index_topk)

    def rotated(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rope(query, key, cos, sin)


class InterleavedIndexerForward(IndexerForward):
    """As IndexerForward, with rope on neighbouring dimensions (GLM-MoE-DSA)."""

    def rotated(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = cos.shape[-1]
        turned = self.rope(query[..., :size], key[..., :size], cos, sin)
        return torch.cat((turned[0], query[..., size:]), dim=-1), torch.cat((turned[1], key[..., size:]), dim=-1)


class _SparseLatent(nn.Module):
    q_a_proj: Linear
    q_a_layernorm: nn.Module
    q_b_proj: Linear
    kv_a_proj_with_mqa: Linear
    kv_a_layernorm: nn.Module
    kv_b_proj: nn.Linear
    o_proj: Linear
    indexer: nn.Module
    rope: OpCall
    absorbed_attention: OpCall
    expanded_attention: OpCall
    sparse_attention: OpCall
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    qk_head_dim: int
    layer_idx: int
    scaling: float

    def attend(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: Any,
        position_ids: torch.Tensor | None,
        selected: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*hidden_states.shape[:-1], -1, self.qk_head_dim)
        query_residual = self.q_a_layernorm(self.q_a_proj(hidden_states))
        query = self.q_b_proj(query_residual).view(shape).transpose(1, 2)
        query_nope, query_rope = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)

        latent, key_rope = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        latent, key_rope = self.kv_a_layernorm(latent).unsqueeze(1), key_rope.unsqueeze(1)
        query_rope, key_rope = self.rope(query_rope, key_rope, *position_embeddings)
        if cache is not None:
            latent, key_rope = cache.update(latent, key_rope, self.layer_idx, kwargs=kwargs)

        if self.indexer is not None:
            mask = None if attention_mask is None else attention_mask[:, 0]
            selected = self.indexer(hidden_states, query_residual, position_embeddings, mask, position_ids, cache=cache)
        states = query_nope, query_rope, latent, key_rope, self.kv_b_proj.weight
        if selected is None:
            raise ValueError("a layer without an indexer needs the selection of a layer before it")
        if selected.shape[-1] < latent.shape[2]:
            output = self.sparse_attention(*states, selected, attention_mask, self.scaling)
        else:
            # Every key is selected. Absorbing pays when keys outnumber queries.
            attention = self.absorbed_attention if hidden_states.shape[1] == 1 else self.expanded_attention
            output = attention(*states, attention_mask, self.scaling)
        return self.o_proj(output.flatten(2)), selected


class SparseLatentForward(_SparseLatent):
    """The ported methods, copied into the generated class."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        output, _ = self.attend(hidden_states, position_embeddings, attention_mask, cache, position_ids, None, kwargs)
        return output, None


class SharedSelectionForward(_SparseLatent):
    """As SparseLatentForward, where layers without an indexer take the selection of the layer before."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        position_ids: torch.Tensor | None = None,
        prev_topk_indices: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None, torch.Tensor]:
        output, selected = self.attend(
            hidden_states, position_embeddings, attention_mask, cache, position_ids, prev_topk_indices, kwargs
        )
        return output, None, selected


class LightningIndexer:
    """Scores of every key from a few narrow heads, and the keys of the best."""

    name = "indexer"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """Candidates with half and interleaved rope; None when the module has no such projections."""
        children = dict(module.named_children())
        if not {"wq_b", "wk", "weights_proj"} <= children.keys():
            return None
        if set(children) != set(INDEXER_PARTS):
            odd = ", ".join(sorted(set(children) ^ set(INDEXER_PARTS)))
            return Mismatch(f"an indexer whose parts differ from {', '.join(INDEXER_PARTS)}: {odd}")
        missing = [a for a in INDEXER_ATTRIBUTES if not hasattr(module, a)]
        if missing:
            return Mismatch(f"an indexer, but no attribute {', '.join(missing)}")
        return [
            Candidate(
                rewrite=self.name,
                forward=forward,
                variant=f"{style} rope",
                keep_linear=("weights_proj",),
                append=(f'self.rope = OpCall("rope", "{style}")', 'self.indexer = OpCall("indexer", "lightning")'),
            )
            for style, forward in (("half", IndexerForward), ("interleaved", InterleavedIndexerForward))
        ]


class SparseLatentAttention:
    """Multi-head latent attention whose keys an indexer selects, its own or that of a layer before."""

    name = "sparse_mla_attention"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """Candidates with interleaved and half rope; None when the module has no latent projections or no indexer."""
        if not hasattr(module, "indexer") or not all(isinstance(getattr(module, n, None), nn.Module) for n in PARTS):
            return None
        parts = [n for n in QUERY_PARTS if not isinstance(getattr(module, n, None), nn.Module)]
        known = {*PARTS, *QUERY_PARTS, "indexer"}
        odd = parts + [name for name, _ in module.named_children() if name not in known]
        if odd:
            return Mismatch(
                f"sparse latent attention whose parts differ from {', '.join(sorted(known))}: {', '.join(odd)}"
            )
        missing = [a for a in RANKS if not hasattr(module, a)]
        if missing:
            return Mismatch(f"sparse latent attention, but no attribute {', '.join(missing)}")
        if getattr(module.kv_b_proj, "bias", None) is not None:
            return Mismatch("sparse latent attention whose kv_b_proj has a bias cannot be absorbed")
        shares = hasattr(module, "skip_topk")
        return [
            Candidate(
                rewrite=self.name,
                forward=SharedSelectionForward if shares else SparseLatentForward,
                variant=f"{style} rope, shared selection" if shares else f"{style} rope",
                keep_linear=("kv_b_proj",),
                drop=("expand_kv",),
                append=(
                    f'self.rope = OpCall("rope", "{style}")',
                    'self.absorbed_attention = OpCall("mla_attention", "absorbed")',
                    'self.expanded_attention = OpCall("mla_attention", "expanded")',
                    'self.sparse_attention = OpCall("sparse_mla_attention", "absorbed")',
                ),
            )
            for style in ("interleaved", "half")
        ]
