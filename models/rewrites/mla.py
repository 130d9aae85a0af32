"""Multi-head latent attention: keys and values stay in the latent cache; decode absorbs kv_b_proj into the query."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from porter.kernels.dispatch import OpCall
from porter.models.linear import Linear
from porter.models.rewrite import Candidate, Mismatch

PARTS = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
RANKS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "scaling", "layer_idx")


class MLAForward(nn.Module):
    """The ported forward, copied into the generated class."""

    q_proj: Linear
    q_a_proj: Linear
    q_a_layernorm: nn.Module
    q_b_proj: Linear
    kv_a_proj_with_mqa: Linear
    kv_a_layernorm: nn.Module
    kv_b_proj: nn.Linear
    o_proj: Linear
    rope: OpCall
    absorbed_attention: OpCall
    expanded_attention: OpCall
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    qk_head_dim: int
    layer_idx: int
    scaling: float

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        batch_size, seq_length = hidden_states.shape[:-1]
        if self.q_lora_rank is None:
            query = self.q_proj(hidden_states)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query = query.view(batch_size, seq_length, -1, self.qk_head_dim).transpose(1, 2)
        query_nope, query_rope = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)

        latent, key_rope = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        latent, key_rope = self.kv_a_layernorm(latent).unsqueeze(1), key_rope.unsqueeze(1)
        # Cosines and sines, or one tensor of complex numbers.
        angles = position_embeddings if isinstance(position_embeddings, tuple) else (position_embeddings,)
        query_rope, key_rope = self.rope(query_rope, key_rope, *angles)
        if cache is not None:
            latent, key_rope = cache.update(latent, key_rope, self.layer_idx, kwargs=kwargs)

        # Absorbing costs kv_lora_rank per query and key, not qk_nope_head_dim, but expands no key: few queries gain.
        few = seq_length == 1 or (seq_length <= 16 and 4 * seq_length <= latent.shape[2])
        attention = self.absorbed_attention if few else self.expanded_attention
        output = attention(
            query_nope, query_rope, latent, key_rope, self.kv_b_proj.weight, attention_mask, self.scaling
        )
        return self.o_proj(output.flatten(2)), None


class MultiHeadLatentAttention:
    """DeepSeek's MLA, with or without a low-rank query."""

    name = "mla_attention"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """Candidates with interleaved, half and complex rope; None when the module has no latent projections."""
        if hasattr(module, "indexer") or not all(isinstance(getattr(module, n, None), nn.Module) for n in PARTS):
            return None
        missing = [a for a in RANKS if not hasattr(module, a)]
        if missing:
            return Mismatch(f"latent attention, but no attribute {', '.join(missing)}")
        if getattr(module.kv_b_proj, "bias", None) is not None:
            return Mismatch("latent attention whose kv_b_proj has a bias cannot be absorbed")
        return [
            Candidate(
                rewrite=self.name,
                forward=MLAForward,
                variant=f"{style} rope",
                keep_linear=("kv_b_proj",),
                drop=("expand_kv",),
                append=(
                    f'self.rope = OpCall("rope", "{style}")',
                    'self.absorbed_attention = OpCall("mla_attention", "absorbed")',
                    'self.expanded_attention = OpCall("mla_attention", "expanded")',
                ),
            )
            for style in ("interleaved", "half", "complex")
        ]
