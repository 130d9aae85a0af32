"""One weight of the source beside what the candidate has for it, and what was judged of the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from porter.alignment.quantized_weight import INT8_LEVELS
from porter.alignment.report import WeightRow


@dataclass(frozen=True)
class Values:
    """A tensor of the source beside the candidate's, unfused and dequantized; None where it cannot be read.

    `step`: the quantizer's step, in a shape that broadcasts to the tensor's; `grid`: the rows and columns that share
    one step, `levels` of them on either side of zero. None where the candidate's tensor is not quantized. `wrong`:
    `why` is a fault, not a limit of porter's.
    """

    reference: Tensor | None
    candidate: Tensor | None
    step: Tensor | None = None
    grid: tuple[int, int] | None = None
    levels: float = INT8_LEVELS
    why: str = ""
    wrong: bool = False


NOTHING = Values(None, None)


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer of the source beside the candidate's values for it, read when they are asked for.

    `stored` is the dtype that the candidate keeps it in, `roundable` the one that its values may have been rounded to
    on the way. `discerning`: it tells things apart (a router's correction bias), so that what counts is its spread.
    """

    name: str
    source: str
    owner: str
    read: Callable[[], Values] | None
    dtype: torch.dtype
    is_parameter: bool
    roundable: torch.dtype
    quantized: bool = False
    discerning: bool = False
    why: str = ""

    def values(self) -> Values:
        """Both sides' values; nothing for a weight that is settled or cannot be compared."""
        return NOTHING if self.read is None else self.read()

    @property
    def reference(self) -> Tensor | None:
        """The source's values, read anew."""
        return self.values().reference

    @property
    def candidate(self) -> Tensor | None:
        """The candidate's values, read anew."""
        return self.values().candidate

    @property
    def step(self) -> Tensor | None:
        """The quantizer's step, read anew."""
        return self.values().step


@dataclass(frozen=True)
class JudgedWeight:
    """A weight with its row of the report."""

    weight: Weight
    row: WeightRow

    def settled(self) -> JudgedWeight:
        """Without the values where they are in order: those are in the two models."""
        return replace(self, weight=replace(self.weight, read=None)) if self.row.status == "ok" else self
