"""The list of known bugs, most specific first, and the choice of the causes that are reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from porter.alignment.drift import Drift
from porter.alignment.hypotheses import (
    activation,
    attention_mask,
    attention_scale,
    bias,
    expert_order,
    gate_up_swapped,
    kv_heads,
    low_precision,
    non_finite,
    norm_eps,
    norm_weight,
    output_relation,
    parameter_layout,
    parameter_scale,
    residual,
    rope_frequencies,
    rope_style,
    router_bias,
    router_groups,
    router_weights,
    shared_expert,
    unknown,
)
from porter.alignment.report import Cause


class Hypothesis(Protocol):
    """One known bug, or a family of them that share a part of the model."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The cause kinds that it can report."""

    def applies(self, drift: Drift) -> bool:
        """Whether the drifting module has the part that the bug needs; cheap."""

    def explain(self, drift: Drift) -> Cause | None:
        """The cause with the error before and after; None where the bug leaves most of the error standing."""


FATAL: tuple[Hypothesis, ...] = (non_finite.NAN, non_finite.OVERFLOW)
"""Tried first: with NaN about, no distance means anything."""

SPECIFIC: tuple[Hypothesis, ...] = (
    bias.PARAMETER,
    parameter_layout.STALE,
    parameter_layout.EXCHANGED_PARAMETERS,
    parameter_layout.TRANSPOSED,
    parameter_layout.PERMUTED,
    low_precision.PARAMETER,
    parameter_scale.RATIO,
    parameter_scale.OFFSET,
    parameter_scale.BLOCKS,
    rope_frequencies.THETA,
    rope_frequencies.SCALING,
    rope_frequencies.POSITION,
    bias.OUTPUT,
    rope_style.HYPOTHESIS,
    gate_up_swapped.HYPOTHESIS,
    activation.HYPOTHESIS,
    router_bias.HYPOTHESIS,
    router_weights.RENORMALISATION,
    router_weights.SCALE,
    router_weights.SCORE,
    router_groups.HYPOTHESIS,
    shared_expert.HYPOTHESIS,
    expert_order.HYPOTHESIS,
    kv_heads.HYPOTHESIS,
    residual.HYPOTHESIS,
    norm_weight.HYPOTHESIS,
    attention_mask.MASK,
    attention_mask.WINDOW,
)
"""Bugs with a name."""

FITTED: tuple[Hypothesis, ...] = (norm_eps.HYPOTHESIS, attention_scale.HYPOTHESIS)
"""Bugs with a name and a number to solve for: dozens of replays, so only where none without explains exactly."""

GENERAL: tuple[Hypothesis, ...] = (
    parameter_scale.ROWS,
    output_relation.BRANCH,
    output_relation.RATIO,
    output_relation.OFFSET,
    low_precision.OUTPUT,
)
"""Relations that also describe the effect of a named bug: reported only where no named bug explains as much."""

CATALOGUE: tuple[Hypothesis, ...] = (*FATAL, *SPECIFIC, *FITTED, *GENERAL, unknown.HYPOTHESIS)
"""The only registry of hypotheses."""

TIE = 3.0
"""Distances after within this factor of each other, or both below a tenth of the floor, cannot be told apart."""


def explain(drift: Drift, catalogue: Sequence[Hypothesis] = CATALOGUE) -> list[Cause]:
    """The causes of one drift, most confident first; `unknown` alone when nothing brings it within the floor.

    Causes within the floor push out partial ones; ties say so and share their confidence.
    """
    last = unknown.HYPOTHESIS
    fatal = _tried(drift, [h for h in catalogue if h in FATAL])
    if fatal:
        return fatal
    late = (*FATAL, *FITTED, *GENERAL, last)
    specific = _tried(drift, [h for h in catalogue if h not in late])
    if not any(found.after is not None and found.after <= drift.floor / 10 for found in specific):
        specific += _tried(drift, [h for h in catalogue if h in FITTED])
    within = [found for found in specific if found.confidence >= 0.5]
    if within:
        return _with_ties(within, drift.floor)
    general = _tried(drift, [h for h in catalogue if h in GENERAL])
    within = [found for found in general if found.confidence >= 0.5]
    if within:
        return _with_ties(within, drift.floor)[:1]
    partial = sorted((*specific, *general), key=lambda found: -found.confidence)[:2]
    rest = last.explain(drift)
    return [*partial, *([rest] if rest is not None else [])]


def _tried(drift: Drift, hypotheses: Sequence[Hypothesis]) -> list[Cause]:
    found = [hypothesis.explain(drift) for hypothesis in hypotheses if hypothesis.applies(drift)]
    return [each for each in found if each is not None]


def _with_ties(causes: Sequence[Cause], floor: float) -> list[Cause]:
    """The best cause, and those that the numbers cannot tell from it."""
    ranked = sorted(causes, key=lambda found: -found.confidence)
    best = ranked[0]
    limit = max(TIE * (best.after or 0.0), floor / 10.0)
    tied = [found for found in ranked if (found.after or 0.0) <= limit]
    if len(tied) == 1:
        return tied
    first, *others = sorted(tied, key=causes.index)
    others = list({found.kind: found for found in reversed(others) if found.kind != first.kind}.values())
    if not others:
        return [first]
    names = ", ".join(sorted(found.kind for found in others))
    share = max(0.5, 1.0 / len(tied))
    said = f"{first.says} (these inputs do not tell it from {names})"
    return [
        dataclasses.replace(first, says=said, confidence=first.confidence * 0.9),
        *(
            dataclasses.replace(
                found, says=f"{found.says} (tied with {first.kind})", confidence=found.confidence * 0.9 * share
            )
            for found in others
        ),
    ]
