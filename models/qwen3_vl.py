"""Qwen3-VL: a vision tower whose features enter the first layers of a Qwen3 text model."""

from __future__ import annotations

from porter.models.family import Family, lazily

FAMILY = Family(
    model_type="qwen3_vl",
    module="transformers.models.qwen3_vl.modeling_qwen3_vl",
    class_name="Qwen3VLForConditionalGeneration",
    expected=("vision_attention", "rms_norm", "attention", "gated_mlp", "decoder_layer"),
    special=(
        "vision tower: attention within each image, of any number of patches, without a mask",
        "deepstack: features of some vision blocks are added to the hidden states of the first text layers",
        "multi-axis rope, interleaved: frame, row and column positions take turns over the frequencies",
        "learned positions of patches, interpolated to the image's grid, beside the rope of rows and columns",
    ),
)

__getattr__ = lazily(FAMILY, globals())
