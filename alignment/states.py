"""What a module keeps from step to step: keys and values, convolution and recurrent states, and how their error grows.

A wrong output is seen at once; a state that is stored too coarsely errs a little more with every step, and shows in
the tokens only after hundreds. So the state itself is compared after each step, and the growth of its error reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from porter.alignment.budget import Verdict, least
from porter.golden.sketch import project

NAMES = ("keys", "values", "conv_states", "recurrent_states")
LABEL = "state."
BUCKETS = 509
"""Bucket sums kept of a state: its distance from another is known to a few percent."""

OTHER_LAYOUT = 0.3
"""Relative errors above this mean that the two keep other things, or in another order: that is their own affair."""

STEPS = 3
"""Decode steps that it takes to speak of growth."""


@dataclass(frozen=True)
class State:
    """A state after one call: its shape, its norm, the bucket sums of a linear sketch, and the narrowest dtype that
    holds its values, whatever the dtype of the tensor."""

    shape: tuple[int, ...]
    held: torch.dtype
    norm: float
    sums: Tensor

    def error(self, exact: State) -> float | None:
        """Relative L2 distance from the exact state, estimated; None where the two are not alike in shape."""
        if self.shape != exact.shape or not exact.norm:
            return None
        return float((self.sums.to(torch.float64) - exact.sums.to(torch.float64)).norm()) / exact.norm


States = Mapping[str, State]


def states_of(cache: Any) -> dict[str, State]:
    """The states in a cache object of transformers, those of its only filled layer by name."""
    found: dict[str, State] = {}
    for layer in getattr(cache, "layers", ()):
        for name in NAMES:
            value = getattr(layer, name, None)
            tensors = list(value.values()) if isinstance(value, dict) else [value]
            for tensor in tensors:
                if isinstance(tensor, Tensor) and tensor.numel() and name not in found:
                    wide = tensor.detach().to(torch.float64)
                    found[name] = State(tuple(tensor.shape), _held(tensor), float(wide.norm()), project(wide, BUCKETS))
    return found


def _held(tensor: Tensor) -> torch.dtype:
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(tensor.to(dtype).to(tensor.dtype), tensor):
            return dtype
    return tensor.dtype


def judged_states(mine: States, exact: States, rounded: Sequence[States], factor: float) -> list[Verdict]:
    """The states of one call that candidate and source keep alike, judged by what rounding makes of the source's."""
    found = []
    for name, truth in exact.items():
        error = mine[name].error(truth) if name in mine else None
        ways = [way[name] for way in rounded if name in way]
        noises = [noise for noise in (way.error(truth) for way in ways) if noise is not None]
        if error is None or error > OTHER_LAYOUT or not noises:
            continue
        own = max(least(way.held) for way in ways)
        # A state that is stored more coarsely than the source's errs by it in every step, and that adds up.
        floor = own if least(mine[name].held) > own else max(own, *noises)
        found.append(Verdict(LABEL + name, error, factor * floor, floor))
    return found


def growth(calls: Sequence[Sequence[Verdict]]) -> str:
    """How the error of every state went over the steps, and the slope beside that of its noise; "" for too few."""
    words = []
    for name in dict.fromkeys(v.label for call in calls for v in call if v.label.startswith(LABEL)):
        seen = [verdict for call in calls for verdict in call if verdict.label == name]
        if len(seen) <= STEPS:
            continue
        first, last = seen[0].error, seen[-1].error
        mine, noise = slope([v.error for v in seen]), slope([v.floor for v in seen])
        words.append(
            f"{name.removeprefix(LABEL)} {first:.2g} -> {last:.2g} over {len(seen)} steps, "
            f"{mine:+.1g} a step where rounding makes {noise:+.1g}"
        )
    return "error of the state: " + "; ".join(words) if words else ""


def slope(values: Sequence[float]) -> float:
    """The slope of the least-squares line through values at steps 0, 1, ..."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    spread = sum((index - middle) ** 2 for index in range(len(values)))
    return sum((index - middle) * (value - mean) for index, value in enumerate(values)) / spread if spread else 0.0
