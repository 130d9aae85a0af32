"""Qwen3-VL-MoE: Qwen3-VL with experts chosen by a softmax over all of them."""

from __future__ import annotations

from typing import Any

from porter.models.family import Family, importable

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


def __getattr__(name: str) -> Any:
    """Qwen3VLMoeForConditionalGeneration, generated and proven when it is first asked for."""
    if name != FAMILY.class_name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = importable(FAMILY)
    return globals()[name]
