"""Putting the tensors of ranks together: adding, concatenating, dealing heads out in turn; and when two are equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from porter.golden.shard_layout import Way


def combined(tensors: Sequence[Tensor], way: Way) -> Tensor:
    """The whole tensor of the parts of all ranks, in the dtype of the parts; partial sums are added in float64.

    RuntimeError or IndexError where the shapes do not allow it.
    """
    first = tensors[0]
    if isinstance(way, str):
        if len({tensor.shape for tensor in tensors}) > 1:
            raise RuntimeError("partial sums have one shape")
        return torch.stack([tensor.to(torch.float64) for tensor in tensors]).sum(dim=0).to(first.dtype)
    if "concat" in way:
        return torch.cat(list(tensors), dim=way["concat"])
    if "interleave" in way:
        size = way["interleave"]
        heads = [tensor.unflatten(-1, (-1, size)) for tensor in tensors]
        return torch.stack(heads, dim=-2).flatten(-3)
    total = sum(way["parts"])
    split = [_split(tensor, way["parts"], total) for tensor in tensors]
    return torch.cat([part for parts in zip(*split, strict=True) for part in parts], dim=-1)


def _split(tensor: Tensor, sizes: Sequence[int], total: int) -> tuple[Tensor, ...]:
    unit, rest = divmod(tensor.shape[-1], total)
    if rest:
        raise RuntimeError(f"a last dimension of {tensor.shape[-1]} is no multiple of {total}")
    parts: tuple[Tensor, ...] = tensor.split([size * unit for size in sizes], dim=-1)
    return parts


def copies_of(parts: Sequence[Sequence[str]]) -> int:
    """How many neighbouring ranks hold the same part, from the digests that each rank has of all calls.

    One group of equal neighbours is enough: a group that is not equal then has a rank with a wrong copy.
    """
    world = len(parts)
    for copies in range(world, 1, -1):
        groups = [parts[start : start + copies] for start in range(0, world, copies)]
        if world % copies == 0 and any(group[0] and all(each == group[0] for each in group) for group in groups):
            return copies
    return 1


def distance(tensor: Tensor, reference: Tensor) -> float:
    """The relative L2 distance in float64 (absolute for a reference of zeros); infinite where one is not finite."""
    if tensor.shape != reference.shape:
        return float("inf")
    if torch.equal(tensor, reference):
        return 0.0
    difference = (tensor.to(torch.float64) - reference.to(torch.float64)).norm()
    scale = reference.to(torch.float64).norm()
    found = float(difference / scale) if scale else float(difference)
    return found if found == found else float("inf")


def resolution(dtype: torch.dtype) -> float:
    """What two ranks may differ by that computed the same in this dtype: one unit roundoff; nothing for integers."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
