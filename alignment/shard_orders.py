"""Other orders in which the rows of ranks could have been written: which of them makes the weight the source's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from porter.alignment.rank_layout import Spread, rows_of

Join = Callable[[Sequence[Tensor]], Tensor]


def other_orders(spread: Spread, sizes: Sequence[int], head: int) -> Iterator[tuple[str, Join]]:
    """(how the ranks' rows are then ordered, what puts them together so) besides that of `spread`.

    `sizes` are the rows of the source's weights that a fused one is made of, `head` is the size of a head.
    """
    if spread.dim is None or spread.added:
        return
    world = len(spread.holders)
    share = spread.whole[spread.dim] // world
    whole = share * world == spread.whole[spread.dim]
    if whole and (spread.segments != ((share, 1),)):
        yield (
            "each rank's rows follow those of the rank before",
            replace(spread, segments=((share, 1),), interleave=None).join,
        )
    for size in dict.fromkeys((head, 1)) if whole else ():
        if share % size == 0 and spread.interleave != size:
            what = f"heads of {size}" if size == head else "single rows"
            yield f"{what} are dealt to the ranks in turn", replace(spread, interleave=size).join
    if spread.dim != rows_of(spread.whole):
        return
    parts = [size for size, _ in spread.segments]
    if len(parts) > 1:
        for groups in _groups(parts, head):
            what = "rows" if groups == min(parts) else f"{groups} groups of heads"
            words = f"on each rank the parts ({', '.join(map(str, parts))} rows) alternate in {what}"
            yield words, partial(_ungrouped, spread, parts, groups)
    if len(parts) == 1 and share % 2 == 0 and whole:
        halves = replace(spread, segments=((share // 2, 1),) * 2)
        yield "each rank holds a half of the first half and a half of the second", halves.join


def _groups(parts: Sequence[int], head: int) -> list[int]:
    """How many groups the parts may alternate in: one for each head of the smallest, or for each of its rows."""
    common = math.gcd(*parts)
    return [groups for groups in dict.fromkeys((common // head, common)) if groups > 1 and common % groups == 0]


def _ungrouped(spread: Spread, parts: Sequence[int], groups: int, pieces: Sequence[Tensor]) -> Tensor:
    """The whole of pieces in which every group holds its share of each part."""
    assert spread.dim is not None, "what is not cut has no order"
    ordered = []
    for piece in pieces:
        grouped = piece.movedim(spread.dim, -1).unflatten(-1, (groups, -1))
        split = grouped.split([part // groups for part in parts], dim=-1)
        ordered.append(torch.cat([part.flatten(-2) for part in split], dim=-1).movedim(-1, spread.dim))
    return spread.join(ordered)
