"""Qwen2 and Qwen2.5: grouped-query attention with biased q, k and v, half rope, silu MLP."""

from __future__ import annotations

from porter.models.family import Family, lazily

FAMILY = Family(
    model_type="qwen2",
    module="transformers.models.qwen2.modeling_qwen2",
    class_name="Qwen2ForCausalLM",
    expected=("rms_norm", "gated_mlp", "attention", "decoder_layer"),
    special=(
        "q, k and v have biases",
        "optional sliding window from max_window_layers on",
    ),
)

__getattr__ = lazily(FAMILY, globals())
