"""Qwen2-MoE (and Qwen1.5-MoE): a softmax router, small experts, and one shared expert behind a sigmoid gate."""

from __future__ import annotations

from porter.models.family import Family, lazily

FAMILY = Family(
    model_type="qwen2_moe",
    module="transformers.models.qwen2_moe.modeling_qwen2_moe",
    class_name="Qwen2MoeForCausalLM",
    expected=("rms_norm", "gated_mlp", "attention", "router", "experts", "shared_expert", "decoder_layer"),
    special=(
        "a shared expert that every token passes, scaled by sigmoid(shared_expert_gate(x))",
        "experts chosen by a softmax over all of them; the chosen weights are not divided by their sum",
        "biases on the query, key and value projections",
    ),
)

__getattr__ = lazily(FAMILY, globals())
