"""How far a module may be from its float64 oracle, and by how much it is over."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from porter.alignment.observation import Observation, relative

EXACT = 1e-6
"""What two float64 evaluations of the same mathematics may differ by: constants written as float32 differ by 6e-8."""

LEAST = {torch.float32: 1e-6, torch.float64: EXACT}
"""Native floors never go below this, else below the unit roundoff of the dtype. Float32 kernels use polynomial
exponentials and other orders of summation that are legitimately this far apart."""


@dataclass(frozen=True)
class Verdict:
    """An observed tensor of a call: its label, its error, its budget, and the measured noise that the budget rests on
    (0 where nothing was measured)."""

    label: str
    error: float
    budget: float
    floor: float = 0.0

    @property
    def over(self) -> bool:
        """Whether the error exceeds the budget."""
        return not self.error <= self.budget

    @property
    def ratio(self) -> float:
        """Error over budget."""
        return self.error / self.budget if self.budget else math.inf


def judged_exact(candidate: Observation, oracle: Observation, cost: float, tolerance: float = EXACT) -> Verdict | None:
    """The worst tensor of the float64 replay; `cost` is what declared quantization adds. None: nothing in common."""
    found = [
        Verdict(label, relative(candidate[label], oracle[label]), tolerance + cost)
        for label in oracle
        if label in candidate
    ]
    return max(found, key=lambda verdict: verdict.ratio, default=None)


def measured(oracle: Observation, rounded: Sequence[Observation]) -> dict[str, float]:
    """The noise of every tensor: the largest distance from the oracle of the source run in the candidate's precision,
    over the legitimate ways to round that were run, and no less than the dtype allows."""
    found = {}
    for label, exact in oracle.items():
        samples = [seen[label] for seen in rounded if label in seen]
        noises = [noise for noise in (relative(sample, exact) for sample in samples) if math.isfinite(noise)]
        if samples:
            found[label] = max(least(samples[0].dtype), *noises, 0.0)
    return found


def judged_native(
    candidate: Observation, oracle: Observation, noise: Mapping[str, float], factor: float, cost: float
) -> list[Verdict]:
    """Every tensor of the replay in the candidate's own precision, the worst first.

    `noise` is what `measured` found on the same inputs: the candidate may err `factor` times as much. Where nothing was
    measured the candidate's dtype alone says what it may.
    """
    found = []
    for label, exact in oracle.items():
        if label in candidate:
            known = noise.get(label)
            floor = least(candidate[label].dtype) if known is None else known
            error = relative(candidate[label], exact)
            found.append(Verdict(label, error, factor * floor + cost, 0.0 if known is None else floor + cost))
    return sorted(found, key=lambda verdict: verdict.ratio, reverse=True)


def least(dtype: torch.dtype) -> float:
    """The smallest floor of a dtype."""
    return LEAST.get(dtype, torch.finfo(dtype).eps / 2 if dtype.is_floating_point else EXACT)
