"""How far a module may be from its float64 oracle, and by how much it is over."""

from __future__ import annotations

import math
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
    """The worst observed tensor of a call: its label, error and budget."""

    label: str
    error: float
    budget: float

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


def judged_native(
    candidate: Observation, oracle: Observation, rounded: Observation, factor: float, cost: float
) -> Verdict | None:
    """The worst tensor of the replay in the candidate's own precision.

    `rounded` is the source run in that precision on the same inputs: its distance from the oracle is the noise that
    the candidate may have `factor` times over.
    """
    found = []
    for label, exact in oracle.items():
        if label not in candidate:
            continue
        floor = least(candidate[label].dtype)
        if label in rounded:
            noise = relative(rounded[label], exact)
            floor = max(least(rounded[label].dtype), noise if math.isfinite(noise) else 0.0)
        found.append(Verdict(label, relative(candidate[label], exact), factor * floor + cost))
    return max(found, key=lambda verdict: verdict.ratio, default=None)


def least(dtype: torch.dtype) -> float:
    """The smallest floor of a dtype."""
    return LEAST.get(dtype, torch.finfo(dtype).eps / 2 if dtype.is_floating_point else EXACT)
