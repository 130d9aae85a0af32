"""A vision-language model at reduced width: its text model as any other, its vision tower beside it."""

from __future__ import annotations

import copy
from typing import Any

# As in reduce.py: widths that a mixed-up dimension does not fit by luck. Heads of 8 have two pairs for each axis.
REDUCED_VISION = {
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 44,
    "num_heads": 4,
    "patch_size": 4,
    "num_position_embeddings": 25,
}
BLOCKS = 3
TAPPED = (0, 2)
"""Blocks whose features also enter the text model, of as many as the config has, and those that see whole images."""
WHOLE = (1,)
WINDOW = 2
"""Merged squares along a window."""
AXES = 3
"""Of positions: frames, rows, columns."""
SPECIAL = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def has_vision(config: Any) -> bool:
    """Whether the config is made of a text and a vision config that this module can reduce."""
    vision = getattr(config, "vision_config", None)
    return hasattr(config, "text_config") and hasattr(vision, "depth") and hasattr(vision, "spatial_merge_size")


def reduced_vision(config: Any, text: Any) -> Any:
    """The fields of `config` with its vision config reduced and its text config replaced by the reduced `text`."""
    data = copy.deepcopy(config.to_dict())
    for name in ("quantization_config", "porter"):
        data.pop(name, None)
    vision = data["vision_config"]
    vision.update({name: value for name, value in REDUCED_VISION.items() if name in vision})
    vision["depth"] = BLOCKS
    if "embed_dim" in vision:  # Qwen2-VL, whose hidden_size is that of the text model
        vision["hidden_size"] = text.hidden_size
    if "out_hidden_size" in vision:
        vision["out_hidden_size"] = text.hidden_size
    if "deepstack_visual_indexes" in vision:
        vision["deepstack_visual_indexes"] = list(TAPPED[: len(vision["deepstack_visual_indexes"])])
    if "fullatt_block_indexes" in vision:
        vision["fullatt_block_indexes"] = list(WHOLE)
    if "window_size" in vision:
        vision["window_size"] = WINDOW * vision["spatial_merge_size"] * vision["patch_size"]
    data["text_config"] = text.to_dict()
    rope = data["text_config"].get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" not in rope:
        # Upstream's code has sections of its own for a config that gives none, which reduced heads do not fit.
        rope["mrope_section"] = [0] * AXES
        reduced_sections(data["text_config"])
    # The last ids of the vocabulary, in the order of the original ones.
    data.update({name: text.vocab_size - len(SPECIAL) + i for i, name in enumerate(n for n in SPECIAL if n in data)})
    return data


def reduced_sections(text: dict[str, Any]) -> None:
    """Share the rotated pairs of a head among the axes of multi-axis rope; other rope has no sections."""
    rope = text.get("rope_parameters")
    if isinstance(rope, dict) and isinstance(rope.get("mrope_section"), list | tuple):
        head = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        axes, rotated = len(rope["mrope_section"]), int(head * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["mrope_section"] = [rotated // axes + (i < rotated % axes) for i in range(axes)]
