"""The second detector: a module that errs within its budget, but unlike the same module of every other layer.

The budget leaves room for another chip's rounding, so a small fault hides in it: an eps of 1e-2 in one norm errs 1.4
times its noise where the other layers err 1.0 times. All layers round alike, so the one that does not stands out: by
the size of its error, or by a constant factor in it, which rounding to nearest does not make. It matters most for
recordings, which cannot be run in float64.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

from porter.alignment.budget import Verdict
from porter.alignment.module_result import ModuleResult
from porter.alignment.pairing import Pair

NEEDED = 4
"""How many siblings there must be besides the module itself."""

LEAST_TIMES = 1.25
"""How many times the median of its siblings an outlier must err, however alike these are."""

LEAST_RATIO = 1.15
"""How many times its own measured noise an outlier must err: below it is as good as the source itself."""

LEAST_GAIN = 0.2
"""Of its own measured noise: constant factors below this are of no account."""

GAIN_NOISES = 7.0
"""How many times what rounding makes of it a constant factor must be."""

SPREAD = 0.04
"""Distances between siblings below this, of the logarithms or of a gain in units of the noise, are taken for it."""

Seen = Mapping[str, Sequence[Verdict]]
"""A module's tensors, each over all calls."""


class Replayed(Protocol):
    """What is needed of a module that was replayed: `tensors` are the verdicts of its native lane, per call."""

    @property
    def pair(self) -> Pair: ...
    @property
    def drifted(self) -> bool: ...
    @property
    def tensors(self) -> Sequence[Sequence[Verdict]]: ...


@dataclass(frozen=True)
class Outlier:
    """A module whose `tensor` is unlike that of its `siblings`: it errs `times` as much as their median.

    Up to `allowed` of its noise would be like them; for a constant factor, up to `allowed` itself.
    """

    module: str
    tensor: str
    times: float
    siblings: int
    allowed: float
    gain: float | None = None

    @property
    def words(self) -> str:
        """For a report."""
        if self.gain is not None:
            return f"{1 + self.gain:.5f} of the right size, {self.times:.2g}x its {self.siblings} siblings"
        return f"{self.times:.2g}x its {self.siblings} siblings"

    def tightened(self, verdict: Verdict) -> Verdict:
        """A verdict with the budget that the siblings allow. A gain adds to the rest of the error in the square."""
        if verdict.label != self.tensor:
            return verdict
        if self.gain is None:
            return replace(verdict, budget=min(verdict.budget, self.allowed * verdict.floor))
        rest = max(verdict.error**2 - verdict.gain**2, 0.0)
        return replace(verdict, budget=min(verdict.budget, math.sqrt(rest + self.allowed**2)))


@dataclass
class Siblings:
    """Gathers the replay's results and finds the outliers among them."""

    _groups: dict[tuple[str, str], dict[str, Seen]] = field(default_factory=dict)
    _drifted: set[str] = field(default_factory=set)

    def add(self, result: Replayed) -> None:
        """Keep the numbers of one module; its tensors are not kept."""
        module = result.pair.module
        if result.drifted:
            self._drifted.add(module)
        seen: dict[str, list[Verdict]] = {}
        for call in result.tensors:
            for verdict in call:
                if verdict.floor > 0 and math.isfinite(verdict.error):
                    seen.setdefault(verdict.label, []).append(verdict)
        kind = ", ".join(_family(source) for source in result.pair.sources)
        self._groups.setdefault((_family(module), kind), {})[module] = seen

    def outliers(self) -> list[Outlier]:
        """The worst tensor of every module that stands out. Modules that drifted anyway are left out."""
        found: dict[str, Outlier] = {}
        for group in self._groups.values():
            for label in sorted({label for seen in group.values() for label in seen}):
                calls = {module: seen[label] for module, seen in group.items() if label in seen}
                for outlier in (*_by_size(label, calls), *_by_gain(label, calls)):
                    known = found.get(outlier.module)
                    if outlier.module not in self._drifted and (known is None or outlier.times > known.times):
                        found[outlier.module] = outlier
        return list(found.values())

    def tightened(self, replay: Callable[[Pair], ModuleResult], pairs: Mapping[str, Pair]) -> Iterator[ModuleResult]:
        """The outliers' results again, in execution order, their budgets what their siblings allow."""
        outliers = [outlier for outlier in self.outliers() if outlier.module in pairs]
        for outlier in sorted(outliers, key=lambda outlier: pairs[outlier.module].position):
            result = replay(pairs[outlier.module])
            result.tensors = [[outlier.tightened(verdict) for verdict in call] for call in result.tensors]
            result.native = [max(call, key=lambda verdict: verdict.ratio, default=None) for call in result.tensors]
            result.outlier = outlier.words
            yield result


def _family(module: str) -> str:
    """A module's name without the numbers of layers and experts."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", module)


def _by_size(label: str, calls: Mapping[str, Sequence[Verdict]]) -> Iterator[Outlier]:
    """By root mean square error over root mean square noise, over all calls, on a logarithmic scale."""
    pooled = {
        module: math.sqrt(sum(v.error**2 for v in seen) / sum(v.floor**2 for v in seen))
        for module, seen in calls.items()
    }
    for module, ratio in pooled.items():
        if ratio < LEAST_RATIO:
            continue
        others = [math.log(max(value, 1e-12)) for name, value in pooled.items() if name != module]
        middle, limit = _typical(others, SPREAD)
        limit = max(math.log(LEAST_TIMES), limit)
        if math.log(ratio) > middle + limit:
            allowed = max(math.exp(middle + limit), LEAST_RATIO)
            yield Outlier(module, label, ratio / math.exp(middle), len(others), allowed)


def _by_gain(label: str, calls: Mapping[str, Sequence[Verdict]]) -> Iterator[Outlier]:
    """By the constant factor over all calls, those that tell it best weighing most."""
    gains = {module: _weighted(seen) for module, seen in calls.items()}
    for module, (gain, rounding) in gains.items():
        noise = min(v.floor for v in calls[module])
        least = max(LEAST_GAIN * noise, GAIN_NOISES * rounding)
        if not abs(gain) > least:
            continue
        others = [value for name, (value, _) in gains.items() if name != module]
        middle, limit = _typical(others, SPREAD * noise)
        limit = max(limit, least)
        if abs(gain - middle) > limit:
            usual = max(median(abs(value) for value in others), SPREAD * noise)
            allowed = abs(middle + math.copysign(limit, gain - middle))
            yield Outlier(module, label, abs(gain) / usual, len(others), allowed, gain)


def _weighted(seen: Sequence[Verdict]) -> tuple[float, float]:
    """The mean gain, and its standard deviation were it rounding alone; each call counts as its own noise says."""
    weights = [1.0 / verdict.gain_noise**2 if verdict.gain_noise > 0 else 0.0 for verdict in seen]
    total = sum(weights)
    if not total:
        return 0.0, math.inf
    return sum(w * v.gain for w, v in zip(weights, seen, strict=True)) / total, 1.0 / math.sqrt(total)


def _typical(others: Sequence[float], spread: float) -> tuple[float, float]:
    """Median, and the distance from it that is still like the others: a few times that of the farthest.

    Up to an eighth of them are left out: they may have the same fault. The fewer there are, the less is known of what
    is usual, and the more times it must be. `spread` is the least that the farthest counts for.
    """
    if len(others) < NEEDED:
        return 0.0, math.inf
    middle = median(others)
    distances = sorted(abs(value - middle) for value in others)
    farthest = distances[len(others) - 1 - len(others) // 8]
    return middle, (3.0 + 8.0 / len(others)) * max(farthest, spread)
