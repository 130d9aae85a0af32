"""An output that is the source's times a constant, or plus a constant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import branches
from porter.alignment.hypotheses.parameter_scale import factor_of
from porter.alignment.hypotheses.relation import relative
from porter.alignment.hypotheses.surgery import map_output
from porter.alignment.hypotheses.trial import Outcome, Trial, cause, distance, solve
from porter.alignment.report import Cause

GRID = tuple(2.0 ** (exponent / 4) for exponent in range(-24, 25))


@dataclass(frozen=True)
class OutputRatio:
    """The least-squares factor between the two outputs."""

    kinds: tuple[str, ...] = ("constant-ratio", "logit-scale")

    def applies(self, drift: Drift) -> bool:
        """Whether there are enough numbers for a factor to mean something."""
        return drift.oracle.numel() > 8

    def explain(self, drift: Drift) -> Cause | None:
        """The factor, and the distance that it leaves."""
        factor = factor_of(drift.oracle, drift.candidate)
        if abs(factor) < 1e-6:
            return None
        kind = "logit-scale" if drift.module.endswith("lm_head") else "constant-ratio"
        inverse = f" (1 / {1 / factor:.6g})" if abs(factor) < 1 else ""
        says = f"The output is {factor:.6g}{inverse} times the source's: a factor is missing or applied once too often"
        after = relative(factor * drift.oracle, drift.candidate) * abs(factor)
        return cause(drift, Outcome(Trial(kind, says), after))


@dataclass(frozen=True)
class BranchRatio:
    """The factor on what attention or the MLP adds to the residual stream of a decoder layer."""

    kinds: tuple[str, ...] = ("constant-ratio",)

    def applies(self, drift: Drift) -> bool:
        """Whether the module is a pre-norm decoder layer."""
        return bool(branches(drift.source_module))

    def explain(self, drift: Drift) -> Cause | None:
        """The branch and the factor that come closest to the candidate."""
        outcomes = [self._solved(drift, branch) for branch, _ in branches(drift.source_module)]
        return cause(drift, min(outcomes, key=lambda outcome: outcome.after, default=None))

    def _solved(self, drift: Drift, branch: str) -> Outcome:
        def scaled(factor: float) -> Callable[[nn.Module], None]:
            return lambda module: map_output(module.get_submodule(branch), lambda output: factor * output)

        factor, after = solve(lambda value: distance(drift, scaled(value)), GRID)
        says = f"{branch}'s output reaches the residual stream times {factor:.6g}: add it once, unscaled"
        return Outcome(Trial("constant-ratio", says, part=branch), after)


@dataclass(frozen=True)
class OutputOffset:
    """The same vector added to every token, or the same number to every element."""

    kinds: tuple[str, ...] = ("constant-offset",)

    def applies(self, drift: Drift) -> bool:
        """Whether there are several tokens to tell an offset from an error."""
        return drift.oracle.dim() > 1 and drift.oracle.flatten(0, -2).shape[0] > 2

    def explain(self, drift: Drift) -> Cause | None:
        """The better of the two offsets."""
        found = min(self._offsets(drift), key=lambda outcome: outcome.after)
        return cause(drift, found)

    def _offsets(self, drift: Drift) -> Iterator[Outcome]:
        error = (drift.candidate - drift.oracle).flatten(0, -2)
        scale = float(drift.oracle.norm())
        value = float(error.mean())
        says = f"The output is the source's plus {value:.6g} in every element: subtract it"
        yield Outcome(Trial("constant-offset", says), _norm(error - value) / scale)
        vector = error.mean(0)
        says = f"The output is the source's plus one vector (of norm {_norm(vector):.4g}) for every token: a stray bias"
        yield Outcome(Trial("constant-offset", says), _norm(error - vector) / scale)


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.norm())


RATIO = OutputRatio()
BRANCH = BranchRatio()
OFFSET = OutputOffset()
