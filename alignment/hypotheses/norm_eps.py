"""A norm with another epsilon: solve for the one that explains the candidate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import eps_name, norms
from porter.alignment.hypotheses.trial import Outcome, Trial, cause, distance, solve
from porter.alignment.report import Cause

GRID = tuple(10.0**exponent for exponent in range(-12, 2))


def with_eps(path: str, eps: float) -> Callable[[nn.Module], None]:
    """Sets the epsilon of the norm at `path`."""

    def change(module: nn.Module) -> None:
        norm = module.get_submodule(path)
        name = eps_name(norm)
        assert name is not None, "only norms are given here"
        setattr(norm, name, eps)

    return change


@dataclass(frozen=True)
class NormEps:
    """Solves for the epsilon of each norm of the module; a round value is preferred where it explains as much."""

    kinds: tuple[str, ...] = ("norm-eps",)

    def applies(self, drift: Drift) -> bool:
        """Whether there is a norm in the module."""
        return bool(norms(drift.source_module, drift.forced))

    def explain(self, drift: Drift) -> Cause | None:
        """The norm and the epsilon that come closest to the candidate."""
        outcomes = [self._solved(drift, path, norm) for path, norm in norms(drift.source_module, drift.forced)]
        return cause(drift, min(outcomes, key=lambda outcome: outcome.after, default=None))

    def _solved(self, drift: Drift, path: str, norm: nn.Module) -> Outcome:
        name = eps_name(norm)
        assert name is not None, "norms() found it"
        own = float(getattr(norm, name))
        value, after = solve(lambda eps: distance(drift, with_eps(path, eps)), GRID)
        rounded = round(value, 1 - math.ceil(math.log10(value)))
        if rounded > 0 and (at_rounded := distance(drift, with_eps(path, rounded))) <= max(after, drift.floor / 2):
            value, after = rounded, at_rounded
        zero = distance(drift, with_eps(path, 0.0))
        if zero <= min(after, drift.floor):
            value, after = 0.0, zero
        where = f"{path}'s epsilon" if path else "The norm's epsilon"
        says = f"{where} acts as {value:.3g} where the source has {own:.3g}: set {name} = {own:.3g}"
        return Outcome(Trial("norm-eps", says[0].upper() + says[1:] if not path else says, part=path), after)


HYPOTHESIS = NormEps()
