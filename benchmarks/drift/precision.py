"""Values with fewer bits than their dtype holds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def coarse(bits: int) -> Callable[[Tensor], Tensor]:
    """Rounded to so many significant bits, whatever the dtype."""

    def change(x: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(x.double())
        return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent).to(x.dtype)

    return change


def narrowed(x: Tensor) -> Tensor:
    """Through the next narrower format: bfloat16 of float32, float8 of the half precisions; float64 as it is."""
    narrower = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float8_e4m3fn, torch.float16: torch.float8_e4m3fn}
    return x.to(narrower[x.dtype]).to(x.dtype) if x.dtype in narrower else x
