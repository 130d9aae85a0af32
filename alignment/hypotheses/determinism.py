"""A module that gives another answer each time it is run: dropout left on, a race, memory that nobody wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from porter.alignment.drift import Drift
from porter.alignment.observation import Observation, worst
from porter.alignment.report import Cause

RUNS = 3
SHARE = 0.1
"""Runs must differ by this share of the drift: sums in another order differ too, by far less."""
STABLE = 0.01
"""Elements that agree in all runs, as a share, that are needed to judge them alone."""


@dataclass(frozen=True)
class Nondeterminism:
    """Runs the candidate again; what changes from run to run is left out, and the rest compared."""

    kinds: tuple[str, ...] = ("nondeterminism",)

    def applies(self, drift: Drift) -> bool:
        """Whether the candidate can be run again."""
        return drift.run_candidate is not None

    def explain(self, drift: Drift) -> Cause | None:
        """How far runs lie apart, and the error of the elements on which they agree."""
        assert drift.run_candidate is not None, "applies() asked"
        runs = [drift.candidate_output, drift.run_candidate()]
        if not worst(runs[1], runs[0])[1] > SHARE * max(drift.before, drift.floor):
            return None
        runs += [drift.run_candidate() for _ in range(RUNS - 1)]
        apart = max(worst(run, drift.candidate_output)[1] for run in runs[1:])
        after, stable = _error_where_stable(drift, runs)
        what = f"{100 * (1 - stable):.0f} % of its values change" if stable < 1 else "its values change"
        says = (
            f"{RUNS + 1} runs on the same inputs differ by {apart:.3g}; {what} from run to run: look for dropout left "
            "on, a race between writes, or memory that is read before it is written"
        )
        sure = 0.99 if after is None or after <= drift.floor else 0.7
        return Cause("nondeterminism", drift.module, sure, drift.before, after, says)


def _error_where_stable(drift: Drift, runs: Sequence[Sequence[Observation]]) -> tuple[float | None, float]:
    """(relative error over the elements equal in all runs, their share); None where too few are."""
    error = size = 0.0
    stable = total = 0
    for index, oracle in enumerate(drift.source_output):
        seen = [run[index].get(drift.tensor) for run in runs]
        expected = oracle.get(drift.tensor)
        if expected is None or any(each is None or each.shape != expected.shape for each in seen):
            continue
        stacked = torch.stack([each for each in seen if each is not None])
        same = (stacked == stacked[:1]).all(0)
        error += float((stacked[0] - expected)[same].square().sum())
        size += float(expected[same].square().sum())
        stable, total = stable + int(same.sum()), total + same.numel()
    share = stable / max(total, 1)
    if share < STABLE or size == 0.0:
        return None, share
    return (error / size) ** 0.5, share


HYPOTHESIS = Nondeterminism()
