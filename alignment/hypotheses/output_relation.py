"""An output that is the source's times a constant, or plus a constant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import branches
from porter.alignment.hypotheses.parameter_scale import factor_of
from porter.alignment.hypotheses.rope_frequencies import is_rotary
from porter.alignment.hypotheses.surgery import map_output
from porter.alignment.hypotheses.trial import Outcome, Trial, cause, distance, joined, mapped, solve
from porter.alignment.report import Cause

ENOUGH = 8
ALIKE = 1.01
"""Factors of tokens within this ratio are one factor."""
GRID = tuple(2.0 ** (exponent / 4) for exponent in range(-24, 25))


@dataclass(frozen=True)
class OutputRatio:
    """The least-squares factor between the two outputs."""

    kinds: tuple[str, ...] = ("constant-ratio", "logit-scale", "rope-scaling")

    def applies(self, drift: Drift) -> bool:
        """Whether there are enough numbers for a factor to mean something."""
        return comparable(drift)

    def explain(self, drift: Drift) -> Cause | None:
        """The factor, and the distance that it leaves."""
        factor = factor_of(joined(drift, drift.source_output), joined(drift, drift.candidate_output))
        if abs(factor) < 1e-6:
            return None
        kind = "logit-scale" if drift.module.endswith("lm_head") else "constant-ratio"
        kind = "rope-scaling" if is_rotary(drift.source_module) else kind
        inverse = f" (1 / {1 / factor:.6g})" if abs(factor) < 1 else ""
        says = f"The output is {factor:.6g}{inverse} times the source's: a factor is missing or applied once too often"
        return cause(drift, Outcome(Trial(kind, says), mapped(drift, lambda tensor: factor * tensor)))


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
        return comparable(drift) and joined(drift, drift.source_output).shape[0] > 2

    def explain(self, drift: Drift) -> Cause | None:
        """The better of the two offsets."""
        found = min(self._offsets(drift), key=lambda outcome: outcome.after)
        return cause(drift, found)

    def _offsets(self, drift: Drift) -> Iterator[Outcome]:
        error = joined(drift, drift.candidate_output) - joined(drift, drift.source_output)
        value = float(error.mean())
        says = f"The output is the source's plus {value:.6g} in every element: subtract it"
        yield Outcome(Trial("constant-offset", says), mapped(drift, lambda tensor: tensor + value))
        vector = error.mean(0)
        says = f"The output is the source's plus one vector (norm {float(vector.norm()):.4g}) per token, a stray bias"
        yield Outcome(Trial("constant-offset", says), mapped(drift, lambda tensor: tensor + vector))


def comparable(drift: Drift) -> bool:
    """Whether both sides have the drifting tensor in one shape, with enough numbers for a relation to say something."""
    if not all(drift.tensor in seen for seen in (*drift.source_output[:1], *drift.candidate_output[:1])):
        return False
    source, candidate = joined(drift, drift.source_output), joined(drift, drift.candidate_output)
    return source.is_floating_point() and source.shape == candidate.shape and source.numel() > ENOUGH


@dataclass(frozen=True)
class TokenRatio:
    """A factor for each token, where one for all explains less: scales of quantized inputs that are not applied."""

    kinds: tuple[str, ...] = ("scale-missing",)

    def applies(self, drift: Drift) -> bool:
        """Whether weights are quantized, tokens have enough numbers each, and there are several."""
        if not drift.holds_codes or not comparable(drift):
            return False
        rows, columns = joined(drift, drift.source_output).shape
        return rows > 2 and columns > ENOUGH

    def explain(self, drift: Drift) -> Cause | None:
        """The range of the factors, and the distance that they leave; None where they are all alike."""
        source, candidate = joined(drift, drift.source_output), joined(drift, drift.candidate_output)
        factors = (source * candidate).sum(-1) / (source * source).sum(-1).clamp_min(1e-300)
        low, high = float(factors.abs().min()), float(factors.abs().max())
        if high <= low * ALIKE:
            return None
        after = float((factors.unsqueeze(-1) * source - candidate).norm() / (factors.unsqueeze(-1) * source).norm())
        says = (
            f"Every token's output is the source's times a number of its own, {low:.4g} to {high:.4g}: the scales of "
            "the tokens' quantized inputs are not applied, or those of other tokens are"
        )
        return cause(drift, Outcome(Trial("scale-missing", says), after))


RATIO = OutputRatio()
TOKENS = TokenRatio()
BRANCH = BranchRatio()
OFFSET = OutputOffset()
