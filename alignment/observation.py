"""Observed tensors of a module's call, by label, and the distance between two such sets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Observation = dict[str, Tensor]
"""Tensors by label: "output", "output.1", "output.logits", "o_proj.input"."""

# Additive masks hold finfo.min or -inf: an L2 norm over them says nothing.
MASK_BELOW = -1e30
HIDES_BELOW = -9e3
"""What a mask adds to hide a key: float16 goes no lower than -65504, and older models add -10000."""


def tensors(value: Any, label: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside nested tuples, lists, dicts and model outputs; the first of a sequence keeps `label`."""
    if isinstance(value, Tensor):
        yield label, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, f"{label}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors(item, f"{label}.{index}" if index else label)


def first_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor inside `value`; else the first tensor."""
    found = [tensor for _, tensor in tensors(value, "")]
    return next((tensor for tensor in found if tensor.is_floating_point()), found[0] if found else None)


def is_mask(tensor: Tensor) -> bool:
    """Whether a floating-point tensor is an additive attention mask."""
    return tensor.dim() == 4 and tensor.numel() > 0 and bool((tensor < MASK_BELOW).any())


def same_shape(tensor: Tensor, shape: torch.Size) -> Tensor | None:
    """`tensor` in `shape` where it only groups leading dimensions differently ([T, H] against [B, S, H])."""
    if tensor.shape == shape:
        return tensor
    same = tensor.numel() == math.prod(shape) and tensor.dim() > 0 and len(shape) > 0 and tensor.shape[-1] == shape[-1]
    return tensor.reshape(shape) if same else None


def relative(candidate: Tensor, reference: Tensor) -> float:
    """Relative L2 difference in float64; infinite where shapes differ or `candidate` is not finite where it should be.

    A reference of zeros is met by zeros alone (0), else infinitely missed.
    """
    candidate_ = same_shape(candidate, reference.shape)
    if candidate_ is None:
        return math.inf
    reference = reference.detach().to(torch.float64)
    mine = candidate_.detach().to(reference.device, torch.float64)
    error, scale = float((mine - reference).norm()), float(reference.norm())
    if not (math.isfinite(error) and math.isfinite(scale)):
        # Equal infinities give NaN by subtraction but are equal.
        error = float(torch.where(mine == reference, 0.0, mine - reference).norm())
        scale = float(reference.nan_to_num(0.0, 0.0, 0.0).norm())
    if error == 0.0:
        return 0.0
    if not math.isfinite(error) or scale == 0.0:
        return math.inf
    return error / scale


@dataclass(frozen=True)
class Distance:
    """How a tensor differs from its reference: `error` as `relative`; `gain`, the part of it that is a constant factor
    (0.01: one percent too large); `gain_noise`, the gain that independent rounding of that error would make."""

    error: float
    gain: float = 0.0
    gain_noise: float = math.inf


def distance(candidate: Tensor, reference: Tensor) -> Distance:
    """The relative error, and its projection on the reference."""
    error = relative(candidate, reference)
    if not math.isfinite(error) or error == 0.0:
        return Distance(error)
    b = reference.detach().to(torch.float64).flatten()
    a = candidate.detach().to(reference.device, torch.float64).flatten()
    if not bool((b * 0.0).sum() == 0.0):  # infinities, which both have: the error is finite
        a, b = a.nan_to_num(0.0, 0.0, 0.0), b.nan_to_num(0.0, 0.0, 0.0)
    squares = b * b
    scale = float(squares.sum())
    # Rounding errs in proportion to each value, so the largest values weigh most in the gain too.
    return Distance(error, float((a - b) @ b) / scale, error * float(squares.norm()) / scale)


def cosine(candidate: Tensor, reference: Tensor) -> float | None:
    """Cosine of the angle between two tensors; None where shapes differ, a norm is zero, or a value is not finite."""
    candidate_ = same_shape(candidate, reference.shape)
    if candidate_ is None:
        return None
    a, b = candidate_.detach().double().flatten(), reference.detach().double().flatten()
    scale = float(a.norm() * b.norm())
    if not math.isfinite(scale) or scale == 0.0:
        return None
    return max(-1.0, min(1.0, float(a @ b) / scale))


def errors(candidate: Observation, reference: Observation) -> dict[str, float]:
    """The relative error of every label that both observed."""
    return {label: relative(candidate[label], reference[label]) for label in reference if label in candidate}


def worst(candidate: Sequence[Observation], reference: Sequence[Observation]) -> tuple[str, float, int]:
    """(label, error, index) of the largest relative error over all steps; ("", inf, 0) where nothing is common."""
    found = [
        (label, error, index)
        for index, (mine, theirs) in enumerate(zip(candidate, reference, strict=False))
        for label, error in errors(mine, theirs).items()
    ]
    return max(found, key=lambda item: item[1], default=("", math.inf, 0))
