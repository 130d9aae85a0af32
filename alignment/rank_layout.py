"""How a weight of the whole model lies on the ranks: along which dimension, in which order, in how many copies.

The rules are those of `porter golden gather`: what a module returns says how its rows are spread. The shapes say along
which dimension a weight is cut, so that row-parallel and expert-parallel weights need no rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from porter.errors import PorterError
from porter.golden.shard_layout import Rule, Way, rule_of
from porter.golden.shard_sum import combined

VOCABULARY = ("embed_tokens.weight", "lm_head.weight", "lm_head.bias")
"""Weights that are filled up to a multiple of the ranks."""

OWN = ("weight", "bias", "weight_scale")
"""Parameters whose module a rule names; others (stacked experts) are named themselves."""


@dataclass(frozen=True)
class Spread:
    """One weight of shape `whole` on the ranks `holders`.

    `dim` is cut, None: every holder has the whole. The cut dimension of a piece is a row of `segments` (size, copies):
    the whole is every segment of all ranks, put together one after the other; of `copies` neighbours that hold the same
    one counts. `interleave`: groups of that size are dealt out in turn instead. `added`: partial sums.
    """

    whole: tuple[int, ...]
    holders: tuple[int, ...]
    dim: int | None = None
    segments: tuple[tuple[int, int], ...] = ()
    interleave: int | None = None
    added: bool = False

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole of the holders' pieces; the first where every holder has the whole."""
        if self.added:
            return combined(pieces, "sum")
        if self.dim is None:
            return pieces[0]
        moved = [piece.movedim(self.dim, -1) for piece in pieces]
        if self.interleave is not None:
            joined = combined(moved, {"interleave": self.interleave})
        else:
            split = [piece.split([size for size, _ in self.segments], dim=-1) for piece in moved]
            parts = zip(zip(*split, strict=True), self.segments, strict=True)
            joined = torch.cat([part for held, (_, copies) in parts for part in held[::copies]], dim=-1)
        return joined.movedim(-1, self.dim).narrow(self.dim, 0, self.whole[self.dim]).contiguous()

    def deal(self, whole: Tensor) -> list[Tensor]:
        """The piece of each holder: the inverse of `join`. Padding is zeros."""
        world = len(self.holders)
        if self.dim is None or self.added:
            return [whole] * world
        moved = whole.movedim(self.dim, -1)
        if self.interleave is not None:
            turns = moved.unflatten(-1, (-1, world, self.interleave))
            return [turns[..., rank, :].flatten(-2).movedim(-1, self.dim) for rank in range(world)]
        totals = [size * world // copies for size, copies in self.segments]
        moved = torch.nn.functional.pad(moved, (0, sum(totals) - moved.shape[-1]))
        chunks = [
            [chunk for chunk in part.split(size, dim=-1) for _ in range(copies)]
            for part, (size, copies) in zip(moved.split(totals, dim=-1), self.segments, strict=True)
        ]
        return [torch.cat([part[rank] for part in chunks], dim=-1).movedim(-1, self.dim) for rank in range(world)]

    def replicas(self, pieces: Sequence[Tensor]) -> list[list[tuple[int, Tensor]]]:
        """Groups of (holder, what it has) that must be equal."""
        if self.added or self.interleave is not None:
            return []
        if self.dim is None:
            return [list(zip(self.holders, pieces, strict=True))]
        split = [piece.split([size for size, _ in self.segments], dim=self.dim) for piece in pieces]
        groups = []
        for number, (_, copies) in enumerate(self.segments):
            held = [(rank, each[number]) for rank, each in zip(self.holders, split, strict=True)]
            groups += [held[start : start + copies] for start in range(0, len(held), copies)] if copies > 1 else []
        return groups


def rows_of(shape: Sequence[int]) -> int:
    """The dimension that a module's outputs are numbered by: of stacked experts it is the second."""
    return max(0, len(shape) - 2)


def spread_of(
    name: str,
    shapes: Mapping[int, tuple[int, ...]],
    whole: tuple[int, ...],
    rules: Sequence[Rule],
    sizes: Sequence[int] = (),
) -> Spread:
    """How the weight `name` of shape `whole` lies on the ranks that hold tensors of these `shapes`.

    `sizes`: the rows of the source's weights that it is made of. PorterError where shapes and rules do not fit.
    """
    owner, _, leaf = name.rpartition(".")
    rule = rule_of(rules, owner if leaf in OWN else name)
    spread, held = Spread(whole, tuple(sorted(shapes))), list(shapes.values())
    unfit = PorterError(
        f"{name}: the ranks hold {', '.join(map(str, map(list, held)))} of the whole {list(whole)}; say how with "
        "--layout"
    )
    if len(set(held)) > 1 or len(held[0]) != len(whole):
        raise unfit
    if rule.weight == "sum" and held[0] == whole:
        return replace(spread, added=True)
    cut = [dim for dim, (mine, theirs) in enumerate(zip(held[0], whole, strict=True)) if mine != theirs]
    if not cut:
        return spread
    dim = cut[0]
    way = _way(rule, dim, whole)
    if len(cut) > 1 or way is None or len(held) < 2:
        raise unfit
    spread = replace(spread, dim=dim)
    if "interleave" in way:
        if held[0][dim] * len(held) != whole[dim] or held[0][dim] % way["interleave"]:
            raise unfit
        return replace(spread, interleave=way["interleave"])
    totals = list(sizes) if sizes and dim == rows_of(whole) else [whole[dim]]
    segments = _segments(held[0][dim], totals, way.get("parts"), len(held), way.get("copies"))
    if segments is None and name.endswith(VOCABULARY) and held[0][dim] * len(held) > whole[dim]:
        segments = ((held[0][dim], 1),)
    if segments is None:
        raise unfit
    return replace(spread, segments=segments)


def _way(rule: Rule, dim: int, whole: Sequence[int]) -> Mapping[str, Any] | None:
    """The words that order the cut dimension; None where they speak of another."""
    if rule.weight is not None:
        if not isinstance(rule.weight, Mapping) or rule.weight.get("concat", dim) % len(whole) != dim:
            return None
        return rule.weight
    way: Way = rule.way(0)
    ordered = isinstance(way, Mapping) and dim == rows_of(whole)
    return way if ordered and isinstance(way, Mapping) else {"concat": dim}


def _segments(
    held: int, totals: Sequence[int], parts: Sequence[int] | None, world: int, copies: int | None
) -> tuple[tuple[int, int], ...] | None:
    """(size, copies) of each segment of a rank's `held` rows; None where they do not make up the `totals`."""
    if parts is not None and len(totals) == 1:
        totals = [totals[0] * part // sum(parts) for part in parts]
    for times in range(1, world + 1):
        # The first (queries, gate rows) is never held twice where there are several.
        often = [copies or times] if len(totals) == 1 else [1] + [times] * (len(totals) - 1)
        sizes = [total * count // world for total, count in zip(totals, often, strict=True)]
        exact = all(size * world == total * count for size, total, count in zip(sizes, totals, often, strict=True))
        if world % times == 0 and exact and sum(sizes) == held:
            return tuple(zip(sizes, often, strict=True))
    return None
