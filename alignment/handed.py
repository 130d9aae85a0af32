"""Positions and masks handed to the modules of a free run: they come from counting, so they are equal or wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from porter.alignment.lanes import real
from porter.alignment.observation import HIDES_BELOW

NAMES = ("position_ids", "cache_position", "attention_mask")
POSITIONAL = "argument"


@dataclass(frozen=True)
class Otherwise:
    """A module was handed other positions or another mask than the golden's: which argument, and how many elements."""

    argument: str
    differ: int
    of: int

    @property
    def words(self) -> str:
        """For a report."""
        what = "attention mask" if "mask" in self.argument else "positions"
        return f"{what} ({self.differ} of {self.of} elements differ from the golden's)"


def otherwise(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], golden: Mapping[str, Any], keep: Tensor | None, rotary: bool
) -> Iterator[Otherwise]:
    """The arguments of a call that must equal the recorded ones and do not.

    Arguments that only one side has, or in other shapes, are another way to say the same and are not compared. `keep`
    [B, S] marks what is no padding. `golden` is the recorded call: {"args": ..., "kwargs": ...}. `rotary`: the module
    takes positions by place too; integers that others take so are choices of experts.
    """
    for name in NAMES:
        found = _differing(kwargs.get(name), golden["kwargs"].get(name), keep)
        if found is not None:
            yield Otherwise(name, *found)
    for index, (mine, theirs) in enumerate(zip(args, golden["args"], strict=False)):
        if rotary and isinstance(mine, Tensor) and not mine.is_floating_point():
            found = _differing(mine, theirs, keep)
            if found is not None:
                yield Otherwise(f"{POSITIONAL} {index}", *found)


def _differing(mine: Any, theirs: Any, keep: Tensor | None) -> tuple[int, int] | None:
    if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor) or mine.shape != theirs.shape:
        return None
    mine, theirs = (_as_counted(tensor, keep) for tensor in (mine, theirs.to(mine.device)))
    differ = int((mine != theirs).sum())
    return (differ, mine.numel()) if differ else None


def _as_counted(tensor: Tensor, keep: Tensor | None) -> Tensor:
    """Masks as what they let through; without the rows of padding, where anything goes."""
    if tensor.dim() == 4:
        seen = tensor if tensor.dtype == torch.bool else tensor > HIDES_BELOW
        if keep is None or seen.shape[2] != keep.shape[1]:
            return seen
        return seen & keep.to(seen.device)[:, None, :, None]
    if tensor.is_floating_point():
        return torch.zeros(0)
    return tensor if keep is None or tensor.dim() < 2 else real(tensor, keep.to(tensor.device))
