"""What the nested configs of a vision-language model must say so that it can be built and run at its real width."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from porter.checkpoint.strict_json import shown
from porter.errors import PorterError
from porter.models.reduce_vision import SPECIAL, has_vision

NESTED = ("text_config", "vision_config")
POSITIVE_SIZES = (
    "depth",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "in_channels",
    "patch_size",
    "spatial_merge_size",
    "temporal_patch_size",
    "out_hidden_size",
    "num_position_embeddings",
    "window_size",
)

Rule = tuple[str, Callable[[Any, Any], bool], str]
RULES: tuple[Rule, ...] = (
    ("hidden_size", lambda v, t: v.hidden_size % v.num_heads == 0, "must be a multiple of num_heads"),
    ("hidden_size", lambda v, t: v.hidden_size // v.num_heads % 4 == 0, "must give heads of 4, 8, 12 ... dimensions"),
    ("out_hidden_size", lambda v, t: v.out_hidden_size == t.hidden_size, "must be text_config's hidden_size"),
    (
        "num_position_embeddings",
        lambda v, t: math.isqrt(v.num_position_embeddings) ** 2 == v.num_position_embeddings,
        "must be a square number",
    ),
    (
        "deepstack_visual_indexes",
        lambda v, t: all(0 <= i < v.depth for i in v.deepstack_visual_indexes),
        "must be blocks, from 0 to depth - 1",
    ),
    (
        "deepstack_visual_indexes",
        lambda v, t: len(v.deepstack_visual_indexes) <= t.num_hidden_layers,
        "must be no more than the text model has layers",
    ),
    (
        "fullatt_block_indexes",
        lambda v, t: all(0 <= i < v.depth for i in v.fullatt_block_indexes),
        "must be blocks, from 0 to depth - 1",
    ),
    (
        "patch_size",
        lambda v, t: isinstance(v.patch_size, int),
        "must be one number: the patches of this code are squares",
    ),
    (
        "window_size",
        lambda v, t: v.window_size >= v.patch_size * v.spatial_merge_size,
        "must hold one merged square of patches",
    ),
)


def check_vision(config: Any, where: str) -> None:
    """Raise PorterError naming file, field and rule for a vision config, or ids of image tokens, that cannot be right;
    other configs pass."""
    if not has_vision(config):
        return
    vision, text = config.vision_config, config.get_text_config()
    for field, holds, words in RULES:
        if hasattr(vision, field) and not holds(vision, text):
            raise PorterError(f"{where}: vision_config.{field} is {shown(repr(getattr(vision, field)))}; {words}")
    for name in SPECIAL:
        value = getattr(config, name, None)
        if value is None:
            continue
        if type(value) is not int or not 0 <= value < text.vocab_size:
            raise PorterError(f"{where}: {name} is {shown(repr(value))}; must be a token id below {text.vocab_size}")
    _check_sections(text, where)


def _check_sections(text: Any, where: str) -> None:
    sections = (text.rope_parameters or {}).get("mrope_section")
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    pairs = int(head * (text.rope_parameters or {}).get("partial_rotary_factor", 1.0)) // 2
    if sections is None:
        return
    if not isinstance(sections, list) or not all(type(each) is int and each >= 0 for each in sections):
        raise PorterError(
            f"{where}: text_config.rope_parameters.mrope_section is {shown(repr(sections))}; must be a list of the "
            "pairs that rotate with frames, rows and columns"
        )
    if sum(sections) != pairs:
        raise PorterError(
            f"{where}: text_config.rope_parameters.mrope_section sums to {sum(sections)}; must sum to {pairs}, the "
            "pairs of a head that rotate"
        )


def vision_sizes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a vision config that must be positive integers; those that may be one for each axis are left out
    where they are lists."""
    return {name: fields[name] for name in POSITIVE_SIZES if name in fields and not isinstance(fields[name], list)}
