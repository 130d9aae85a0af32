"""DeepSeek-V2, V2-Lite, V2.5 and Coder-V2: latent attention, softmax routing within the best groups, shared experts."""

from __future__ import annotations

from typing import Any

from porter.models.family import Family, importable

FAMILY = Family(
    model_type="deepseek_v2",
    module="transformers.models.deepseek_v2.modeling_deepseek_v2",
    class_name="DeepseekV2ForCausalLM",
    expected=("rms_norm", "gated_mlp", "mla_attention", "router", "experts", "decoder_layer"),
    special=(
        "the cache holds latents; decode absorbs kv_b_proj into the query",
        "the Lite models project the query at full rank",
        "rope multiplies neighbours as complex numbers, and leaves them neighbours; yarn scales the softmax",
        "softmax router in float32, greedy over all experts or within the best groups; weights scaled, not normalised",
    ),
)


def __getattr__(name: str) -> Any:
    """DeepseekV2ForCausalLM, generated and proven when it is first asked for."""
    if name != FAMILY.class_name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = importable(FAMILY)
    return globals()[name]
