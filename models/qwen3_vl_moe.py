"""Qwen3-VL-MoE: Qwen3-VL with experts chosen by a softmax over all of them."""

from __future__ import annotations

from porter.models.family import Family, lazily

FAMILY = Family(
    model_type="qwen3_vl_moe",
    module="transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe",
    class_name="Qwen3VLMoeForConditionalGeneration",
    expected=("vision_attention", "rms_norm", "attention", "router", "experts", "decoder_layer"),
    special=(
        "vision tower, deepstack and multi-axis rope as Qwen3-VL",
        "experts chosen by a softmax over all of them, their weights divided by their sum",
        "checkpoints store the stacked experts transposed: [experts, input, output]",
    ),
)

__getattr__ = lazily(FAMILY, globals())
