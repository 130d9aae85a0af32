"""Statistics of one tensor: minimum, maximum, mean, L2 norm, and how many elements are not finite."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from porter.golden.one_pass import Moments, one_pass

_LOST_SQUARE = 1e-30
"""Mean squares below this may have lost elements whose square float32 does not hold (1e-38)."""

_NORM_ROW = 1024
_REDUCED_AS_THEY_ARE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def statistics(tensor: Tensor) -> dict[str, Any]:
    """``{"min", "max", "mean", "l2", "nan", "inf"}`` of a real or complex tensor of any dtype and strides.

    Sums run in float32 for floating dtypes up to 32 bits (relative error about 1e-6), in float64 for float64, integers
    and bool; a complex tensor counts as its real and imaginary parts. If any element is NaN or infinite, or squares
    leave the range of the sums, everything is taken over the finite elements in float64. Without (finite) elements min,
    max and mean are None.
    """
    values = tensor.detach()
    measured = None if values.is_complex() else one_pass(values.contiguous())
    if measured is not None:
        return statistics_of(measured.moments, values)
    return statistics_by_torch(values)


def statistics_of(moments: Moments, values: Tensor) -> dict[str, Any]:
    """The statistics of the tensor that has these moments."""
    return of_moments(moments, values.numel()) if tells(moments, values.numel()) else _of_finite_elements(values)


def tells(moments: Moments, numel: int) -> bool:
    """Whether the statistics of ``numel`` elements follow from their moments."""
    least, greatest, total, squares = moments
    return math.isfinite(total + squares) and (squares >= numel * _LOST_SQUARE or not (least or greatest))


def of_moments(moments: Moments, numel: int) -> dict[str, Any]:
    """The statistics that follow from moments."""
    least, greatest, total, squares = moments
    return {"min": least, "max": greatest, "mean": total / numel, "l2": math.sqrt(squares), "nan": 0, "inf": 0}


def statistics_by_torch(values: Tensor) -> dict[str, Any]:
    """``statistics`` without kernels, in four passes."""
    values = _reducible(values)
    if values.numel():
        accumulator = torch.float64 if values.dtype == torch.float64 else torch.float32
        low, high = torch.aminmax(values)
        norm = l2_norm(values, accumulator)
        least, greatest, summed, l2 = _numbers(low, high, values.sum(dtype=accumulator), norm)
        return statistics_of(Moments(least, greatest, summed, l2 * l2), values)
    return _of_finite_elements(values)


def l2_norm(values: Tensor, accumulator: torch.dtype) -> Tensor:
    """The L2 norm, as a scalar tensor, by rows of 1024 elements in dtype ``accumulator`` and then over the rows.

    One flat pass would add every square to a few running sums, whose rounding grows with the length: 2e-5 relative for
    half a million elements in float32, against 1e-7 by rows.
    """
    flat = values.reshape(-1)
    rows, rest = divmod(flat.numel(), _NORM_ROW)
    if rows < 2:
        return _norm(flat, accumulator)
    parts = torch.linalg.vector_norm(flat[: flat.numel() - rest].view(rows, _NORM_ROW), dim=1, dtype=accumulator)
    if rest:
        parts = torch.cat([parts, _norm(flat[-rest:], accumulator).view(1)])
    return _norm(parts, torch.float64)


def _norm(flat: Tensor, accumulator: torch.dtype) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(flat, dtype=accumulator)
    return norm


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
    values = _reducible(values)
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
