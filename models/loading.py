"""Load an original checkpoint into a ported class, and save it back under its original names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

from porter.correspondence import Correspondence


class JoinRows(ConversionOps):
    """Concatenate the sources' rows, in the order of the source patterns; `sizes` are their rows."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **keywords: Any
    ) -> dict[str, Any]:
        """One tensor under the only target pattern."""
        parts = [input_dict[pattern] for pattern in source_patterns]
        return {target_patterns[0]: torch.cat([p[0] if isinstance(p, list) else p for p in parts], dim=0)}

    @property
    def reverse_op(self) -> ConversionOps:
        """Splitting by the same rows."""
        return SplitRows(self.sizes)


class SplitRows(ConversionOps):
    """Undo `JoinRows`. `sizes` are in proportion: layers of one form may differ in width (a vision tower's MLP and a
    text model's)."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **keywords: Any
    ) -> dict[str, Any]:
        """One tensor per target pattern."""
        tensor = next(iter(input_dict.values()))
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        sizes = [size * tensor.shape[0] // sum(self.sizes) for size in self.sizes]
        return {t: c.contiguous() for t, c in zip(target_patterns, tensor.split(sizes, dim=0), strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        """Joining by the same rows."""
        return JoinRows(self.sizes)


def weight_converters(correspondence: Correspondence) -> list[WeightConverter]:
    """transformers' converters for the module entries; layers that share a form share a converter."""
    converters: dict[tuple[str, ...], WeightConverter] = {}
    for entry in correspondence.modules().entries:
        for parameter in ("weight", "bias"):
            target, *sources = (_within_layer(f"{name}.{parameter}") for name in (entry.target, *entry.sources))
            key = (target, *sources)
            if key not in converters:
                converters[key] = WeightConverter(list(sources), target, [JoinRows(entry.sizes)])
    return list(converters.values())


def _within_layer(name: str) -> str:
    """`name` after its last layer index: self_attn.q_proj.weight."""
    return re.split(r"\.\d+\.", name)[-1]


@contextmanager
def registered_conversions(class_name: str, model_type: str, correspondence: Correspondence) -> Iterator[None]:
    """Let transformers apply `correspondence` to models named `class_name`, while the context lasts.

    The registry is transformers' own and process-wide; an entry that was there before is put back.
    """
    before = conversion_mapping.get_checkpoint_conversion_mapping(class_name)
    # As transformers looks them up: what is registered for the class comes before what is for its type.
    upstream = before or conversion_mapping.get_checkpoint_conversion_mapping(model_type) or []
    was_registered = class_name in conversion_mapping.USER_REGISTERED_MAPPINGS
    mapping = [*upstream, *weight_converters(correspondence)]
    conversion_mapping.register_checkpoint_conversion_mapping(class_name, mapping, overwrite=True)
    try:
        yield
    finally:
        registry: Any = conversion_mapping._checkpoint_conversion_mapping_cache
        registry.pop(class_name, None)
        if before is not None:
            registry[class_name] = before
        if not was_registered:
            conversion_mapping.USER_REGISTERED_MAPPINGS.discard(class_name)
