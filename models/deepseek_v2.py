"""DeepSeek-V2, V2-Lite, V2.5 and Coder-V2: latent attention, softmax routing within the best groups, shared experts."""

from __future__ import annotations

from porter.models.family import Family, lazily

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

__getattr__ = lazily(FAMILY, globals())
