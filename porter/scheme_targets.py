"""Whether a chip's kernels can run what a scheme makes of a model."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from porter.chips.catalogue import Chip, load_catalogue
from porter.errors import PorterError
from porter.kernels.registry import REFERENCE, default_registry
from porter.quantization import Scheme

NATIVE_ONLY = ("w8a8_static", "w4a8")
"""Variants that exist for the chips whose kernels run them: the reference would undo what they are for."""
QUANTIZED = ("w8a16", "w8a8", *NATIVE_ONLY)


def refuse_on(chip: Chip, scheme: Scheme, ops: Iterable[tuple[str, str]], dtype: torch.dtype) -> None:
    """Raise PorterError where `chip` cannot run one of a port's quantized `ops` (name, variant) by a kernel of its own:
    any on a chip of a vendor, on a CPU those that were made for another chip."""
    for name, variant in ops:
        if variant in QUANTIZED and (reason := _lacking(chip, name, variant, dtype)) is not None:
            others = [
                c.name for c in load_catalogue() if c.native_providers and _lacking(c, name, variant, dtype) is None
            ]
            have = f"; chips that have one: {', '.join(others)}" if others else ""
            raise PorterError(f"--scheme {scheme.name}: {chip.name} has no kernel of {name}/{variant} ({reason}){have}")


def _lacking(chip: Chip, name: str, variant: str, dtype: torch.dtype) -> str | None:
    """Why no provider of the chip takes the Op; None where one does, or the reference is a fair choice."""
    registry = default_registry()
    resolution = registry.resolve(name, variant, chip.name, chip.providers)
    if not resolution.implementations:
        if chip.device == "cpu" and variant not in NATIVE_ONLY:
            return None
        return "; ".join(resolution.refused.values()) or f"only the {REFERENCE} computes it"
    return registry.undocumented(name, variant, chip.name, resolution.implementations[0][0], dtype)
