"""Qwen3-MoE: grouped-query attention with query and key norms, and experts chosen by a softmax over all of them."""

from __future__ import annotations

from typing import Any

from porter.models.family import Family, importable

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


def __getattr__(name: str) -> Any:
    """Qwen3MoeForCausalLM, generated and proven when it is first asked for."""
    if name != FAMILY.class_name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = importable(FAMILY)
    return globals()[name]
