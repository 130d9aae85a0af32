"""How far a module may be from its float64 oracle, and by how much it is over."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from scipy.special import fdtri

from porter.alignment.observation import Observation, distance, relative

EXACT = 1e-6
"""What two float64 evaluations of the same mathematics may differ by: constants written as float32 differ by 6e-8."""

LEAST = {torch.float32: 1e-6, torch.float64: EXACT}
"""Native floors never go below this, else below half the unit roundoff of the dtype. Float32 kernels use polynomial
exponentials and other orders of summation that are legitimately this far apart."""

UNLUCKY = 0.01
"""The probability that rounding alone exceeds a budget somewhere, where many tensors are judged."""

ROUNDED_KURTOSIS = 5.4
"""Of the errors of rounding normal values: see `allowance`."""


@dataclass(frozen=True)
class Verdict:
    """An observed tensor of a call: its label, error and budget, and the measured noise that the budget rests on.

    The noise is 0 where nothing was measured. `gain` is the part of the error that is a constant factor, `gain_noise`
    what rounding makes of it.
    """

    label: str
    error: float
    budget: float
    floor: float = 0.0
    gain: float = 0.0
    gain_noise: float = math.inf

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


@dataclass(frozen=True)
class Noise:
    """What legitimate rounding makes of a tensor: its largest error, and the largest constant factor in it."""

    error: float
    gain: float


def measured(oracle: Observation, rounded: Sequence[Observation]) -> dict[str, Noise]:
    """The noise of every tensor: the largest distance from the oracle of the source run in the candidate's precision,
    over the legitimate ways to round that were run, and no less than the dtype allows."""
    found = {}
    for label, exact in oracle.items():
        samples = [seen[label] for seen in rounded if label in seen]
        if samples:
            noises = [each for each in (distance(sample, exact) for sample in samples) if math.isfinite(each.error)]
            error = max([least(samples[0].dtype), *(each.error for each in noises)])
            found[label] = Noise(error, max((abs(each.gain) for each in noises), default=0.0))
    return found


def judged_native(
    candidate: Observation,
    oracle: Observation,
    noise: Mapping[str, Noise],
    factor: float,
    cost: float,
    recorded: torch.dtype = torch.float64,
    probes: int = 1,
) -> list[Verdict]:
    """Every tensor of the replay in the candidate's own precision, the worst first.

    `noise` is what `measured` found on the same inputs: the candidate may err `factor` times as much, or what
    `allowance` says where this is one of many `probes`. Where nothing was
    measured the coarser of the candidate's dtype and `recorded`, in which the oracle was rounded, says what it may.
    """
    found = []
    for label, exact in oracle.items():
        if label not in candidate:
            continue
        known = noise.get(label)
        seen = distance(candidate[label], exact)
        if known is None:
            unit = max(least(candidate[label].dtype), least(recorded))
            found.append(Verdict(label, seen.error, factor * unit + cost))
        else:
            budget, floor = _budget(known.error, factor, exact.numel(), probes) + cost, known.error + cost
            found.append(Verdict(label, seen.error, budget, floor, seen.gain, max(seen.gain_noise, known.gain)))
    return sorted(found, key=lambda verdict: verdict.ratio, reverse=True)


@cache
def allowance(elements: int, probes: int) -> float:
    """The ratio of two legitimate errors of `elements` values that the largest of `probes` such ratios stays below, in
    all but UNLUCKY of the cases.

    A legitimate error and the measured noise are two draws of the same rounding, and the norm of few values fluctuates.
    Of errors with kurtosis k = E[e^4] / E[e^2]^2 the sum of squares has mean and variance of a chi-squared variable
    with 2 * elements / (k - 1) degrees of freedom (Satterthwaite), so the squared ratio follows Fisher's F; its
    quantile is taken at 1 - UNLUCKY / probes (Bonferroni). A rounded normal value errs by a uniform share of itself:
    k = 9/5 * 3 = 5.4. Errors of sums are nearer to normal, k = 3. For 100,000 probes the ratio is below 2 from 135
    elements on.
    """
    freedom = 2.0 * elements / (ROUNDED_KURTOSIS - 1.0)
    # With equal degrees of freedom the inverse of the ratio is distributed alike.
    return 1.0 / math.sqrt(float(fdtri(freedom, freedom, UNLUCKY / probes)))


def _budget(noise: float, factor: float, elements: int, probes: int) -> float:
    """What a tensor may err: `factor` times its noise; one of many, as much as the unluckiest of them, but never by as
    much as its own size."""
    alone = factor * noise
    return alone if probes <= 1 or not elements else max(alone, min(1.0, allowance(elements, probes) * noise))


def least(dtype: torch.dtype) -> float:
    """The smallest floor of a dtype.

    Rounding random values once makes an error of 0.42 unit roundoffs in the root mean square: the mean over mantissas
    m in [1, 2) of 1 / (sqrt(3) m). A module that happens to round less is given that much.
    """
    return LEAST.get(dtype, torch.finfo(dtype).eps / 4 if dtype.is_floating_point else EXACT)
