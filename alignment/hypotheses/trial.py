"""Trying a known bug: plant it in a copy of the source, replay, and see whether the candidate's output appears."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from scipy.optimize import minimize_scalar
from torch import nn

from porter.alignment.drift import Drift, Inputs
from porter.alignment.hypotheses.surgery import shallow_copy
from porter.alignment.model_call import CannotRun
from porter.alignment.observation import Observation
from porter.alignment.report import Cause

Change = Callable[[nn.Module], None]
ChangeInputs = Callable[[tuple[Any, ...], dict[str, Any]], Inputs]

PARTIAL_AT_MOST = 0.4
"""Confidence that a cause which leaves part of the error standing may have."""
NEXT_TO_NOTHING = 1e-3
"""Share of the floor below which no other trial of the same hypothesis can do better by a margin that counts."""
PARTIAL_NEEDED = 0.5
"""A cause that leaves more than this share of the error standing explains nothing and is not reported."""


@dataclass(frozen=True)
class Trial:
    """One bug to plant. `change` mutates a copy of the source, `inputs` the golden inputs; `says` is for the user."""

    kind: str
    says: str
    change: Change | None = None
    inputs: ChangeInputs | None = None
    part: str = ""
    """The submodule of the source that the bug sits in; empty for the module itself."""
    resolves: float = 0.0
    """Distances up to this are zero for this trial: what an emulated rounding may differ by from the machine's."""


@dataclass(frozen=True)
class Outcome:
    """A trial and the distance that it leaves between the source with the bug and the candidate."""

    trial: Trial
    after: float


def distance(drift: Drift, change: Change | None = None, inputs: ChangeInputs | None = None) -> float:
    """Relative distance to the candidate's output of the source with `change` planted, on (changed) golden inputs.

    A bug that the module cannot carry (a shape that no longer fits) is infinitely far.
    """
    copied = shallow_copy(drift.source_module)
    try:
        if change is not None:
            change(copied)
        return drift.distance(drift.run(copied, inputs))
    except (CannotRun, RuntimeError):
        return math.inf


def joined(drift: Drift, observations: Sequence[Observation]) -> torch.Tensor:
    """The drifting tensor of all steps as one matrix [tokens, features]; a single column where its width varies."""
    steps = [seen[drift.tensor] for seen in observations if drift.tensor in seen]
    width = steps[0].shape[-1] if len({step.shape[-1] for step in steps}) == 1 else 1
    return torch.cat([step.reshape(-1, width) for step in steps])


def mapped(drift: Drift, change: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Distance to the candidate of the source's output with the drifting tensor passed through `change`.

    A module with several outputs of that shape (cosines and sines) has them all changed.
    """

    def one(seen: Observation) -> Observation:
        drifting = seen[drift.tensor]
        together = drift.tensor.startswith("output")
        return {
            label: change(tensor)
            if label == drift.tensor or (together and label.startswith("output") and tensor.shape == drifting.shape)
            else tensor
            for label, tensor in seen.items()
        }

    return drift.distance([one(seen) for seen in drift.source_output if drift.tensor in seen])


def best(drift: Drift, trials: Iterable[Trial]) -> Outcome | None:
    """The trial that comes closest to the candidate; the first of equals, and the first that leaves next to nothing."""
    nearest: Outcome | None = None
    for trial in trials:
        outcome = Outcome(trial, distance(drift, trial.change, trial.inputs))
        if nearest is None or outcome.after < nearest.after:
            nearest = outcome
        if nearest.after <= drift.floor * NEXT_TO_NOTHING:
            break
    return nearest


def solve(objective: Callable[[float], float], grid: Sequence[float]) -> tuple[float, float]:
    """(value, distance) at the minimum of `objective`: the best of the positive `grid`, then refined."""
    distances = [objective(value) for value in grid]
    index = min(range(len(grid)), key=distances.__getitem__)
    low, high = grid[max(index - 1, 0)], grid[min(index + 1, len(grid) - 1)]
    if low == high:
        return grid[index], distances[index]
    refined = minimize_scalar(
        lambda exponent: objective(math.exp(exponent)),
        bounds=(math.log(low), math.log(high)),
        method="bounded",
        options={"xatol": 1e-8, "maxiter": 50},
    )
    if float(refined.fun) < distances[index]:
        return math.exp(float(refined.x)), float(refined.fun)
    return grid[index], distances[index]


def confidence(before: float, after: float, floor: float) -> float:
    """How sure the numbers make us: within the floor the share of the error that is gone; otherwise at most 0.4.

    Below the floor nothing is resolved, so an `after` counts as at least a thousandth of it.
    """
    if not math.isfinite(after):
        return 0.0
    gone = max(0.0, 1.0 - max(after, floor / 1000.0) / max(before, 1e-300))
    return min(0.999, gone) if after <= floor else PARTIAL_AT_MOST * gone


def cause(drift: Drift, outcome: Outcome | None, before: float | None = None) -> Cause | None:
    """The report's cause of an outcome; None where it leaves more than half of the error standing."""
    if outcome is None:
        return None
    before = drift.before if before is None else before
    if not outcome.after <= PARTIAL_NEEDED * before:
        return None
    floor = max(drift.floor, outcome.trial.resolves)
    sure = confidence(before, outcome.after, floor)
    says = outcome.trial.says if outcome.after <= floor else f"Partly explained: {outcome.trial.says}"
    return Cause(outcome.trial.kind, drift.module, sure, before, outcome.after, says)


@dataclass(frozen=True)
class TrialHypothesis:
    """A hypothesis that is a list of bugs to try."""

    kinds: tuple[str, ...]
    trials: Callable[[Drift], Iterable[Trial]] = field(repr=False)

    def applies(self, drift: Drift) -> bool:
        """Whether the source module has the part that the bug needs."""
        return next(iter(self.trials(drift)), None) is not None

    def explain(self, drift: Drift) -> Cause | None:
        """The bug that comes closest to the candidate."""
        return cause(drift, best(drift, self.trials(drift)))
