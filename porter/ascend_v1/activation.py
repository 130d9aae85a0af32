"""How activations of static types are quantized: one scale and offset per fused group, exact in the model's dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from porter.activation_range import HIGHEST, LOWEST, STEPS, Range
from porter.ascend_v1.fused_groups import groups_of
from porter.ascend_v1.quant_type import Linear
from porter.checkpoint.strict_json import listed
from porter.errors import PorterError

CANDIDATES = 4
"""Values of the model's dtype that a scale is chosen among, the least that covers the range being the first."""


@dataclass(frozen=True)
class InputScale:
    """q = round(x / scale + offset) in [-128, 127]: `scale` above 0, whole `offset` in [-128, 127]."""

    scale: float
    offset: int


def loadable_scales(
    ranges: Mapping[str, Range], linears: Sequence[Linear], model_type: str, dtype: torch.dtype
) -> dict[str, InputScale]:
    """The scales of `linears` by their names, from `ranges` by the names of their modules: one for each fused group.

    vllm-ascend holds one input_scale for a fused layer, the last that it loads, so a group gets the range that covers
    all of its members. It loads it into a parameter of the model's dtype and multiplies by its reciprocal in that
    dtype (methods/w8a8_static.py), so the scale is a value of the dtype, near above, whose reciprocal is best.

    Raises PorterError naming linears that `ranges` lacks.
    """
    missing = [linear.module for linear in linears if linear.module not in ranges]
    if missing:
        raise PorterError(
            f"--calibration: {len(missing)} linears of static type have no range ({listed(missing)}); give data that "
            "reaches them, or choose a dynamic scheme (--scheme w8a8)"
        )
    found = {linear.name: ranges[linear.module] for linear in linears}
    for group in groups_of(list(found), model_type):
        found |= dict.fromkeys(group.members, reduce(Range.joined, (found[member] for member in group.members)))
    return {name: loadable(measured, dtype) for name, measured in found.items()}


def loadable(measured: Range, dtype: torch.dtype) -> InputScale:
    """Scale and offset of a range: low has the code -128, and what is above the range room at its upper end."""
    if measured.low == measured.high:
        return InputScale(1.0, 0)
    wanted = torch.tensor((measured.high - measured.low) / STEPS, dtype=torch.float32)
    near = wanted.to(dtype)
    least = near.view(torch.int16) + (0 if float(near) >= float(wanted) else 1)
    tried = (least + torch.arange(CANDIDATES, dtype=torch.int16)).view(dtype)
    scale = min(tried, key=reciprocal_error)
    if not bool(scale.isfinite()) or float(scale) == 0:
        name = str(dtype).removeprefix("torch.")
        raise PorterError(
            f"--calibration: an input in [{measured.low:.3g}, {measured.high:.3g}] has no scale in {name}"
        )
    offset = round(LOWEST - measured.low / float(scale))
    return InputScale(float(scale), min(max(offset, LOWEST), HIGHEST))


def reciprocal_error(scale: torch.Tensor) -> float:
    """|scale * (1 / scale in the dtype of `scale`) - 1|: by how much the chip's quantized inputs are off together."""
    return abs(float(scale.double() * (1 / scale).double()) - 1)
