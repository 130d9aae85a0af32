"""Statistics of one tensor in four passes: minimum, maximum, mean, L2 norm, and how many elements are not finite."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_REDUCED_AS_THEY_ARE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def statistics(tensor: Tensor) -> dict[str, Any]:
    """``{"min", "max", "mean", "l2", "nan", "inf"}`` of a real or complex tensor of any dtype and strides.

    Sums run in float32 for floating dtypes up to 32 bits (relative error about 1e-6), in float64 for float64, integers
    and bool; a complex tensor counts as its real and imaginary parts. If any element is NaN or infinite, or the norm
    overflows float32, everything is taken over the finite elements in float64. Without (finite) elements min, max and
    mean are None.
    """
    values = _reducible(tensor.detach())
    if values.numel():
        accumulator = torch.float64 if values.dtype == torch.float64 else torch.float32
        low, high = torch.aminmax(values)
        total = values.sum(dtype=accumulator)
        norm = torch.linalg.vector_norm(values, dtype=accumulator)
        least, greatest, summed, l2 = _numbers(low, high, total, norm)
        if math.isfinite(summed) and math.isfinite(l2):
            return {"min": least, "max": greatest, "mean": summed / values.numel(), "l2": l2, "nan": 0, "inf": 0}
    return _of_finite_elements(values)


def _reducible(tensor: Tensor) -> Tensor:
    if tensor.dtype in _REDUCED_AS_THEY_ARE:
        return tensor
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.float64)


def _numbers(*scalars: Tensor) -> list[float]:
    """Python numbers of scalar tensors, with one transfer where they are on a device."""
    if scalars[0].device.type == "cpu":
        return [float(scalar.item()) for scalar in scalars]
    numbers: list[float] = torch.stack([scalar.to(torch.float32) for scalar in scalars]).tolist()
    return numbers


def _of_finite_elements(values: Tensor) -> dict[str, Any]:
    finite = values[torch.isfinite(values)].double()
    counts = {"nan": int(values.isnan().sum()), "inf": int(values.isinf().sum())}
    if not finite.numel():
        return {"min": None, "max": None, "mean": None, "l2": 0.0, **counts}
    low, high = torch.aminmax(finite)
    # The largest magnitude is divided out: the square of a finite float64 may overflow.
    scale = max(abs(float(low)), abs(float(high))) or 1.0
    norm = scale * float(torch.linalg.vector_norm(finite / scale))
    mean = scale * float((finite / scale).mean())
    return {"min": float(low), "max": float(high), "mean": mean, "l2": norm, **counts}
