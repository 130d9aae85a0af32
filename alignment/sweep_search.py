"""The smallest regime that fails: along the length by halving, then one aspect after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from porter.alignment.regimes import Regime, fitted

Fails = Callable[[Regime], "bool | None"]


@dataclass(frozen=True)
class Boundary:
    """Where along `axis` ("length" or "offset") passing turns into failing: `fails` is next to `passes`."""

    axis: str
    passes: int
    fails: int


@dataclass(frozen=True)
class Smallest:
    """The smallest failing regime, the boundary that it lies on (None: it fails at the shortest length there is), and
    the simpler regimes that pass."""

    regime: Regime
    boundary: Boundary | None
    passing: tuple[Regime, ...]

    def says(self) -> str:
        """One clause for the headline."""
        aspects, regime, boundary = ", ".join(self.regime.aspects()), self.regime, self.boundary
        if boundary is None:
            passing = ", ".join(regime.unlike(each) for each in self.passing)
            already = f"fails at sequence length {regime.length} already, {aspects}"
            return f"{already}; passes {passing}" if passing else already
        if boundary.axis == "offset":
            plain = ", ".join(replace(regime, offset=0).aspects())
            start = f"fails from position offset {boundary.fails}, sequence length {regime.length}, {plain}"
            return f"{start}; passes at {boundary.passes}"
        if boundary.passes > boundary.fails:
            up_to = f"fails up to sequence length {boundary.fails}, {aspects}"
            return f"{up_to}; passes at {boundary.passes}"
        return f"fails from sequence length {boundary.fails}, {aspects}; passes at {boundary.passes}"


def smallest(regime: Regime, fails: Fails, far: int, longest: int) -> Smallest:
    """From a `regime` that fails to the smallest: shorter while it fails, then simpler, until neither is possible.

    Assumes that what fails at a length fails at all greater ones; where the shortest fails, that is asked. `far` is the
    last position of the model, `longest` the greatest length to try.
    """
    while True:
        regime, boundary = _shortest(regime, fails)
        simpler = [each for each in regime.simpler() if each.shortest <= each.length <= longest]
        found = next((each for each in simpler if fails(each)), None)
        if found is None:
            break
        regime = found
    if boundary is None and regime.offset:
        regime, boundary = _nearest(regime, fails)
    if boundary is None:
        boundary = _longest(regime, fails, far, longest)
    return Smallest(regime, boundary, tuple(each for each in simpler if fails(each) is False))


def halved(passes: int, fails: int, test: Callable[[int], bool | None]) -> tuple[int, int]:
    """Neighbouring (passes, fails) between a passing and a failing number, either of which may be the greater."""
    while abs(fails - passes) > 1:
        middle = (passes + fails) // 2
        passes, fails = (passes, middle) if test(middle) else (middle, fails)
    return passes, fails


def _shortest(regime: Regime, fails: Fails) -> tuple[Regime, Boundary | None]:
    least = regime.shortest
    if regime.length <= least or fails(regime.at(least)):
        return regime.at(least), None
    passing, failing = halved(least, regime.length, lambda length: fails(regime.at(length)))
    return regime.at(failing), Boundary("length", passing, failing)


def _nearest(regime: Regime, fails: Fails) -> tuple[Regime, Boundary]:
    """The smallest offset that fails, given that none (0) passes."""
    passing, failing = halved(0, regime.offset, lambda offset: fails(replace(regime, offset=offset)))
    return replace(regime, offset=failing), Boundary("offset", passing, failing)


def _longest(regime: Regime, fails: Fails, far: int, longest: int) -> Boundary | None:
    """Whether a regime that fails at its shortest passes at `longest`, and up to where it fails."""
    long = fitted(regime, longest, far)
    if long is None or long.offset != regime.offset or longest <= regime.length or fails(long) is not False:
        return None
    passing, failing = halved(longest, regime.length, lambda length: fails(regime.at(length)))
    return Boundary("length", passing, failing)
