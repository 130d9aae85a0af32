"""The text model of Qwen3.5-MoE: Qwen3.5 with experts and a gated shared expert in every layer."""

from __future__ import annotations

from porter.models.family import Family, lazily
from porter.models.prediction import QWEN

FAMILY = Family(
    model_type="qwen3_5_moe_text",
    module="transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
    class_name="Qwen3_5MoeForCausalLM",
    expected=(
        "rms_norm",
        "gated_rms_norm",
        "gated_mlp",
        "gated_delta_net",
        "gated_attention",
        "router",
        "experts",
        "shared_expert",
        "hybrid_layer",
    ),
    special=(
        "gated delta nets: a causal convolution, then a rule, chunked to prefill, recurrent to decode; float32 states",
        "attention with an output gate, zero-centred q and k norms and partial rope in every fourth layer",
        "in_proj_qkv and in_proj_z, and in_proj_b and in_proj_a, each become one product",
        "rope of three interleaved axes, which are equal for text",
        "experts beside a shared expert with a gate of its own",
        "the multi-token prediction layer is ported beside the model; the vision tower is not ported",
    ),
    prediction=QWEN,
)

__getattr__ = lazily(FAMILY, globals())
