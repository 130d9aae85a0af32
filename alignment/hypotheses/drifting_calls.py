"""A drift of some of the recorded calls alone: a fault in the kernel for many tokens at once, or in that for one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.observation import Observation, worst


def of_drifting_calls(drift: Drift) -> Drift | None:
    """`drift` seen in the calls that are over its floor alone; None where all are, or the steps are not comparable.

    Every call is still run, as later ones read the caches of earlier ones.
    """
    if len(drift.source_output) != len(drift.candidate_output):
        return None
    pairs = zip(drift.candidate_output, drift.source_output, strict=True)
    over = [i for i, (mine, theirs) in enumerate(pairs) if not worst([mine], [theirs])[1] <= drift.floor]
    if not over or len(over) == len(drift.source_output):
        return None

    def chosen(observations: Sequence[Observation]) -> list[Observation]:
        return [observations[i] for i in over]

    def run(module: nn.Module, inputs: Any) -> list[Observation]:
        return chosen(drift.run_module(module, inputs))

    again = drift.run_candidate
    return dataclasses.replace(
        drift,
        source_output=chosen(drift.source_output),
        candidate_output=chosen(drift.candidate_output),
        keep=[drift.keep[i] for i in over] if len(drift.keep) == len(drift.source_output) else drift.keep,
        run_candidate=None if again is None else lambda: chosen(again()),
        run_module=run,
    )


def calls_in_words(narrowed: Drift, drift: Drift) -> str:
    """Which calls these are, for a sentence's end."""
    return f"(in {len(narrowed.source_output)} of the {len(drift.source_output)} recorded calls; the others agree)"
