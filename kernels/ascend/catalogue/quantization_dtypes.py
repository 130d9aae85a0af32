"""The dtypes that operators take as a number: torch's own numbering of scalar types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from porter.kernels.ascend.catalogue.rules import short
from porter.kernels.ascend.catalogue.vendor_op import Call, Rule

NUMBERED = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    11: torch.bool,
    12: torch.qint8,
    13: torch.quint8,
    14: torch.qint32,
    15: torch.bfloat16,
    16: torch.quint4x2,
}
"""c10/core/ScalarType.h. torch's dispatcher hands a dtype that a schema calls `int` on as this number."""


def as_dtype(value: Any) -> torch.dtype | None:
    """The dtype behind an argument that is one, its number, or None. Raises KeyError for numbers of the vendor's own
    (256 and above: float8, float4 and hifloat8 of chip 950)."""
    return value if value is None or isinstance(value, torch.dtype) else NUMBERED[int(value)]


def dtype_one_of(name: str, *allowed: torch.dtype | None, chips: Sequence[str] = ()) -> Rule:
    """The argument `name`, a dtype or its number, is one of `allowed`."""
    text = ", ".join("None" if dtype is None else short(dtype) for dtype in allowed)
    return Rule((name,), f"{name} to be one of {text}", lambda call: _known(call, name) in allowed, tuple(chips))


def _known(call: Call, name: str) -> Any:
    try:
        return as_dtype(call[name])
    except KeyError:
        return "a number of the vendor's own"
