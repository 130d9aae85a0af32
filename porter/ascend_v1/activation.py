"""How activations of static types are quantized: one scale and offset per linear, measured by a calibration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from porter.ascend_v1.fused_groups import groups_of
from porter.checkpoint.strict_json import listed, read_object, shown
from porter.errors import PorterError

CALIBRATION_LIMIT = 200_000_000
CANDIDATES = 4
"""Values of the model's dtype that a scale is chosen among, the least that covers the range being the first."""

REMEDY = "write it again with `porter calibrate`"


@dataclass(frozen=True)
class InputScale:
    """q = round(x / scale + offset) in [-128, 127]: `scale` above 0, whole `offset` in [-128, 127]."""

    scale: float
    offset: int

    @property
    def low(self) -> float:
        """The least input that is not clipped."""
        return (-128 - self.offset) * self.scale

    @property
    def high(self) -> float:
        """The largest input that is not clipped."""
        return (127 - self.offset) * self.scale


def read_calibration(file: Path) -> dict[str, InputScale]:
    """The linears of a calibration: {"linears": {name: {"input_scale": s, "input_offset": o}}}; other keys are left.

    Raises PorterError naming the file, the linear and the field.
    """
    linears = read_object(file, REMEDY, CALIBRATION_LIMIT).get("linears")
    if not isinstance(linears, dict):
        raise PorterError(f"{file}: linears: expected an object of names to input_scale and input_offset; {REMEDY}")
    return {name: _entry(file, name, fields) for name, fields in linears.items()}


def _entry(file: Path, name: str, fields: object) -> InputScale:
    at = f"{file}: linears[{shown(name)}]"
    if not isinstance(fields, dict):
        raise PorterError(f"{at}: expected an object with input_scale and input_offset; {REMEDY}")
    scale, offset = fields.get("input_scale"), fields.get("input_offset", 0)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < float(scale) < math.inf:
        raise PorterError(f"{at}.input_scale: {shown(str(scale))} is not a number above 0; {REMEDY}")
    if isinstance(offset, bool) or not isinstance(offset, (int, float)) or offset not in range(-128, 128):
        raise PorterError(f"{at}.input_offset: {shown(str(offset))} is not a whole number in [-128, 127]; {REMEDY}")
    return InputScale(float(scale), int(offset))


def loadable_scales(
    calibration: Mapping[str, InputScale], linears: Iterable[str], model_type: str, dtype: torch.dtype
) -> dict[str, InputScale]:
    """The scales of `linears` as they are written: one for each fused group, exact in the model's `dtype`.

    vllm-ascend holds one input_scale for a fused layer, the last that it loads, so a group gets the range that covers
    all of its members. It loads it into a parameter of the model's dtype and multiplies by its reciprocal in that
    dtype (methods/w8a8_static.py), so the scale is a value of the dtype, near above, whose reciprocal is best.

    Raises PorterError naming linears that `calibration` lacks.
    """
    names = list(linears)
    missing = [name for name in names if name not in calibration]
    if missing:
        raise PorterError(
            f"--calibration: {len(missing)} linears of static type have no input_scale ({listed(missing)}); calibrate "
            "this model, or choose a dynamic scheme (--scheme w8a8)"
        )
    result = {name: loadable(calibration[name], dtype) for name in names}
    for group in groups_of(names, model_type):
        members = [calibration[name] for name in group.members]
        low, high = min(m.low for m in members), max(m.high for m in members)
        scale = (high - low) / 255
        joint = InputScale(scale, max(-128, min(127, round(-128 - low / scale))))
        result |= dict.fromkeys(group.members, loadable(members[0] if len(set(members)) == 1 else joint, dtype))
    return result


def loadable(wanted: InputScale, dtype: torch.dtype) -> InputScale:
    """`wanted` with a scale that `dtype` holds, no smaller, and the offset that keeps the range's middle."""
    scale = torch.tensor(wanted.scale, dtype=torch.float32)
    near = scale.to(dtype)
    bits = near.view(torch.int16) + (0 if float(near) >= wanted.scale else 1)
    tried = (bits + torch.arange(CANDIDATES, dtype=torch.int16)).view(dtype)
    best = tried[int(torch.tensor([reciprocal_error(t) for t in tried]).argmin())]
    if not bool(best.isfinite()):
        raise PorterError(f"input_scale {wanted.scale:.3g} overflows {str(dtype).removeprefix('torch.')}")
    middle = (wanted.low + wanted.high) / 2
    offset = round(-0.5 - middle / float(best)) if wanted.offset else 0
    return InputScale(float(best), max(-128, min(127, offset)))


def reciprocal_error(scale: torch.Tensor) -> float:
    """|scale * (1 / scale in the dtype of `scale`) - 1|: by how much the chip's quantized inputs are off together."""
    return abs(float(scale.double() * (1 / scale).double()) - 1)
