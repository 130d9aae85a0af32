"""Qwen3 dense: grouped-query attention with a norm on each head's query and key."""

from __future__ import annotations

from porter.models.family import Family, lazily

FAMILY = Family(
    model_type="qwen3",
    module="transformers.models.qwen3.modeling_qwen3",
    class_name="Qwen3ForCausalLM",
    expected=("rms_norm", "gated_mlp", "attention", "decoder_layer"),
    special=(
        "q_norm and k_norm on each head before rope",
        "head_dim is independent of hidden_size",
    ),
)

__getattr__ = lazily(FAMILY, globals())
