"""What of two calls can be compared, and what noise is typical of a tensor over several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from torch import Tensor

from porter.alignment.budget import Noise
from porter.alignment.lanes import Seen
from porter.alignment.observation import Observation
from porter.alignment.routing import COMBINE, Flips


def comparable(seen: Seen, oracle: Seen, ways: Sequence[Seen], flipped: Flips | None) -> list[Observation]:
    """The tensors of all, without the weights of tokens with other experts: they cannot agree, and a flip is judged by
    its margin."""
    views = [seen.tensors, oracle.tensors, *(way.tensors for way in ways)]
    if flipped is None or oracle.choice is None:
        return views
    same = ~flipped.flipped
    for way in ways:
        if way.choice is not None:
            same = same & ~(way.choice.sets() != oracle.choice.sets()).any(dim=1)
    return [_unflipped(view, same) for view in views]


def no_less_than_typical(noise: Mapping[str, Noise], every: Sequence[Mapping[str, Noise]]) -> dict[str, Noise]:
    """A small tensor may by luck round to nearly nothing in one call: its noise is that of the median call at least."""
    typical = {label: median(each[label].error for each in every if label in each) for label in noise}
    return {label: replace(own, error=max(own.error, typical[label])) for label, own in noise.items()}


def _unflipped(view: Observation, same: Tensor) -> Observation:
    return {label: t[same] if label == COMBINE and t.shape[0] == same.shape[0] else t for label, t in view.items()}
