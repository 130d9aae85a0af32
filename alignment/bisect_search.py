"""The smallest part of a set that still does what the whole does, by halving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

Item = TypeVar("Item")


def minimal(items: Sequence[Item], does: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """A subset of `items` for which `does` holds and from which nothing can be left out.

    Delta debugging: first each half, then each quarter and its complement, and so on: one culprit among n takes about
    log2(n) trials. `does(items)` must hold; it is not tried again.
    """
    kept, pieces = list(items), 2
    while len(kept) > 1:
        parts = _split(kept, min(pieces, len(kept)))
        found = next((part for part in parts if does(part)), None)
        if found is not None:
            kept, pieces = found, 2
            continue
        rests = [[item for other in parts if other is not part for item in other] for part in parts]
        rest = next((rest for rest in rests if does(rest)), None) if len(parts) > 2 else None
        if rest is not None:
            kept, pieces = rest, max(2, len(parts) - 1)
        elif len(parts) == len(kept):
            break
        else:
            pieces = 2 * len(parts)
    return kept


def _split(items: list[Item], pieces: int) -> list[list[Item]]:
    bounds = [len(items) * index // pieces for index in range(pieces + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]
