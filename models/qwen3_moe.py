"""Qwen3-MoE: grouped-query attention with query and key norms, and experts chosen by a softmax over all of them."""

from __future__ import annotations

from porter.models.family import Family, lazily

FAMILY = Family(
    model_type="qwen3_moe",
    module="transformers.models.qwen3_moe.modeling_qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    expected=("rms_norm", "attention", "router", "experts", "decoder_layer"),
    special=(
        "experts chosen by a softmax over all of them; norm_topk_prob divides the chosen weights by their sum",
        "q_norm and k_norm on each head before rope",
        "layers in mlp_only_layers, and all but every decoder_sparse_step-th, have a dense MLP",
    ),
)

__getattr__ = lazily(FAMILY, globals())
