"""DeepSeek-V3, R1 and V3.1: latent attention, grouped sigmoid routing with a correction bias, shared experts."""

from __future__ import annotations

from porter.models.family import Family, lazily
from porter.models.prediction import DEEPSEEK

FAMILY = Family(
    model_type="deepseek_v3",
    module="transformers.models.deepseek_v3.modeling_deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    expected=("rms_norm", "gated_mlp", "mla_attention", "router", "experts", "decoder_layer"),
    special=(
        "the cache holds latents; decode absorbs kv_b_proj into the query",
        "interleaved rope; yarn scales the softmax by mscale squared",
        "router in float32; the correction bias chooses but does not weigh",
        "the multi-token prediction layer is ported beside the model, for speculative decoding",
    ),
    prediction=DEEPSEEK,
)

__getattr__ = lazily(FAMILY, globals())
