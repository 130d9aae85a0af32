"""An error that only rows of the batch with padding have: leave these rows out and it is gone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.trial import Outcome, Trial, cause
from porter.alignment.observation import Observation, relative
from porter.alignment.report import Cause


def padded_tokens(drift: Drift) -> list[torch.Tensor | None]:
    """Per step, which of the observed tokens [n] belong to rows that hold padding; None where there is none."""
    found: list[torch.Tensor | None] = []
    for keep in drift.keep:
        rows = None if keep is None else (~keep).any(-1)
        found.append(None if keep is None or rows is None else rows[:, None].expand_as(keep)[keep])
    return found


@dataclass(frozen=True)
class PaddedRows:
    """Compares the tokens of rows without padding alone."""

    kinds: tuple[str, ...] = ("padding-rows",)

    def applies(self, drift: Drift) -> bool:
        """Whether a step holds both rows with padding and rows without."""
        return any(rows is not None and 0 < int(rows.sum()) < rows.numel() for rows in padded_tokens(drift))

    def explain(self, drift: Drift) -> Cause | None:
        """The error that is left in rows without padding."""
        after, padded = 0.0, None
        for seen, oracle, keep, rows in zip(
            drift.candidate_output, drift.source_output, drift.keep, padded_tokens(drift), strict=False
        ):
            padded = padded if keep is None else (~keep).any(-1)
            after = max(after, _error(seen, oracle, drift.tensor, rows if rows is not None else padded))
        says = (
            "Only rows of the batch that hold padding differ, rows without it agree: hide the padded positions "
            "(mask, positions, states) as the source does"
        )
        return cause(drift, Outcome(Trial("padding-rows", says), after))


def _error(seen: Observation, oracle: Observation, label: str, padded: torch.Tensor | None) -> float:
    """The error of what is not `padded`: of the observed tokens of a prefill, of the rows [B] of a step after it, which
    takes one token each. All of it where neither can be told apart."""
    if label not in seen or label not in oracle or seen[label].shape != oracle[label].shape:
        return 0.0
    mine, theirs = seen[label], oracle[label]
    if padded is not None and mine.shape[:1] == padded.shape:
        if bool(padded.all()):
            return 0.0
        mine, theirs = mine[~padded], theirs[~padded]
    return relative(mine, theirs)


HYPOTHESIS = PaddedRows()
