"""Qwen2.5-VL: a vision tower of windowed attention before a Qwen2.5 text model."""

from __future__ import annotations

from porter.models.family import Family, lazily

FAMILY = Family(
    model_type="qwen2_5_vl",
    module="transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    class_name="Qwen2_5_VLForConditionalGeneration",
    expected=("vision_attention", "rms_norm", "attention", "gated_mlp", "decoder_layer"),
    special=(
        "vision tower: attention within windows of patches, in the blocks of fullatt_block_indexes within whole images",
        "vision blocks have gated MLPs and RMS norms",
        "multi-axis rope: a section of the frequencies for each of frame, row and column",
    ),
)

__getattr__ = lazily(FAMILY, globals())
