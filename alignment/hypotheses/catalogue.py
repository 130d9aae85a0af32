"""The list of known bugs, most specific first, and the choice of the causes that are reported."""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from porter.alignment.drift import Drift
from porter.alignment.hypotheses import (
    accumulation,
    activation,
    attention_mask,
    attention_scale,
    attention_softmax,
    bias,
    block_scales,
    convolution,
    determinism,
    expert_order,
    gate_up_swapped,
    kv_cache,
    kv_heads,
    low_precision,
    nibble_order,
    non_finite,
    norm_eps,
    norm_precision,
    norm_weight,
    output_relation,
    padding,
    parameter_layout,
    parameter_scale,
    parameter_use,
    quantization,
    recurrent_state,
    reduction,
    residual,
    rope_frequencies,
    rope_style,
    router_bias,
    router_groups,
    router_precision,
    router_weights,
    shared_expert,
    unknown,
    zero_point,
)
from porter.alignment.hypotheses.drifting_calls import calls_in_words, of_drifting_calls
from porter.alignment.hypotheses.relation import drifted, with_parameters_of_candidate
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


FATAL: tuple[Hypothesis, ...] = (
    non_finite.NAN,
    non_finite.OVERFLOW,
    determinism.HYPOTHESIS,
    recurrent_state.STORED,
)
"""Tried first: with NaN about, or another answer each time, or where outputs are right and states alone are not, no
distance between outputs means anything."""

PARAMETERS: tuple[Hypothesis, ...] = (
    bias.PARAMETER,
    parameter_layout.STALE,
    parameter_layout.EXCHANGED_PARAMETERS,
    parameter_layout.TRANSPOSED,
    nibble_order.HYPOTHESIS,
    parameter_layout.PERMUTED,
    quantization.PARAMETER,
    router_precision.PARAMETER,
    low_precision.PARAMETER,
    parameter_scale.RATIO,
    parameter_scale.OFFSET,
    block_scales.MISREAD_SCALES,
    block_scales.EXCHANGED,
    zero_point.HYPOTHESIS,
)
"""Wrong values of a parameter, recognised from the values alone."""

PARAMETERS_GENERAL: tuple[Hypothesis, ...] = (parameter_scale.ROWS, parameter_scale.BLOCKS)
"""What also describes the effect of the ones above."""

PARAMETERS_PARTLY: tuple[Hypothesis, ...] = (parameter_layout.PARTS,)
"""The part of a parameter that is wrong, where nothing tells how."""

MATHEMATICS: tuple[Hypothesis, ...] = (
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
    router_precision.HYPOTHESIS,
    shared_expert.HYPOTHESIS,
    expert_order.HYPOTHESIS,
    kv_heads.HYPOTHESIS,
    parameter_use.HYPOTHESIS,
    residual.HYPOTHESIS,
    norm_weight.HYPOTHESIS,
    norm_precision.HYPOTHESIS,
    attention_mask.PADDING,
    attention_mask.WINDOW,
    attention_mask.MASK,
    attention_softmax.HYPOTHESIS,
    attention_softmax.NARROW,
    kv_cache.STALE,
    kv_cache.NARROW,
    recurrent_state.DTYPE,
    recurrent_state.RESET,
    convolution.HYPOTHESIS,
    reduction.MISSING,
    reduction.DOUBLED,
    quantization.ACTIVATION,
    accumulation.HYPOTHESIS,
)
"""Bugs with a name in what a module does with its inputs."""

FITTED: tuple[Hypothesis, ...] = (
    norm_eps.HYPOTHESIS,
    attention_scale.HYPOTHESIS,
    attention_mask.PLACE,
    kv_cache.SCALE,
    rope_frequencies.OTHER_POSITIONS,
    rope_frequencies.OTHER_FREQUENCIES,
)
"""Bugs with a name and a number to solve for: dozens of replays, so only where none without explains exactly."""

GENERAL: tuple[Hypothesis, ...] = (
    output_relation.BRANCH,
    output_relation.RATIO,
    output_relation.TOKENS,
    output_relation.OFFSET,
    low_precision.OUTPUT,
    non_finite.CLIPPED,
    padding.HYPOTHESIS,
)
"""Relations that also describe the effect of a named bug: reported only where no named bug explains as much."""

CATALOGUE: tuple[Hypothesis, ...] = (
    *FATAL,
    *PARAMETERS,
    *PARAMETERS_GENERAL,
    *PARAMETERS_PARTLY,
    *MATHEMATICS,
    *FITTED,
    *GENERAL,
    unknown.HYPOTHESIS,
)
"""The only registry of hypotheses."""

TIE = 3.0
"""Distances after within this factor of each other, or both below a tenth of the floor, cannot be told apart."""
TIE_OF_PARAMETERS = 1.25
"""Of parameters, thousands of values say how much a relation leaves: less is needed to tell two apart."""
EXPLAINED = 0.5
"""Confidence from which a cause counts as an explanation."""


def explain(drift: Drift) -> list[Cause]:
    """The causes of one drift, most confident first; `unknown` where nothing brings it within the floor.

    Where nothing explains all calls, those that drift are looked at alone: prefill and decoding run other kernels.
    """
    found = _explain(drift)
    narrowed = None if any(cause.confidence >= EXPLAINED for cause in found) else of_drifting_calls(drift)
    if narrowed is None:
        return found
    words = calls_in_words(narrowed, drift)
    again = [
        dataclasses.replace(cause, says=f"{cause.says} {words}")
        for cause in _explain(narrowed)
        if cause.confidence >= EXPLAINED
    ]
    return again or found


def _explain(drift: Drift) -> list[Cause]:
    """The causes of one drift, tried on all its calls.

    Wrong parameters come first: the source is replayed with the candidate's. Where that reproduces the candidate they
    are all there is to explain; else mathematics is tried on what they leave.
    """
    fatal = _tried(drift, FATAL)
    if fatal:
        return fatal
    found = explain_parameters(drift)
    left = with_parameters_of_candidate(drift) if found or _differ(drift) else drift
    if left is not None:
        found += _mathematics(left)
    elif not found:
        found = _last(drift)
    return sorted(found, key=lambda cause: -cause.confidence)


def explain_parameters(drift: Drift) -> list[Cause]:
    """The causes of each parameter that differs, from its values alone: no replay is needed. A kind is said once."""
    found: list[Cause] = []
    for parameter in drifted(drift):
        own = {n: value for n, (value, _) in drift.weights.items() if n != parameter.key}
        # Chained, not merged: those elsewhere may be on disk, and are read one at a time.
        elsewhere: Mapping[str, Tensor] = ChainMap(own, drift.elsewhere)  # type: ignore[arg-type]
        alone = dataclasses.replace(
            drift, weights={parameter.key: drift.weights[parameter.key]}, elsewhere=elsewhere, lane="exact"
        )
        for group in (PARAMETERS, PARAMETERS_GENERAL, PARAMETERS_PARTLY):
            best = _best(_tried(alone, group), parameter.floor, TIE_OF_PARAMETERS)
            found += best
            if best:
                break
    return list({cause.kind: cause for cause in reversed(found)}.values())[::-1]


def _mathematics(drift: Drift) -> list[Cause]:
    named = _tried(drift, MATHEMATICS)
    if not any(found.after is not None and found.after <= drift.floor / 10 for found in named):
        named += _tried(drift, FITTED)
    best = _best(named, drift.floor)
    if best:
        return best
    general = _tried(drift, GENERAL)
    best = _best(general, drift.floor)
    if best:
        return best[:1]
    partial = sorted((*named, *general), key=lambda found: -found.confidence)[:2]
    return [*partial, *_last(drift)]


def _last(drift: Drift) -> list[Cause]:
    rest = unknown.HYPOTHESIS.explain(drift)
    return [] if rest is None else [rest]


def _differ(drift: Drift) -> bool:
    return next(drifted(drift), None) is not None


def _tried(drift: Drift, hypotheses: Sequence[Hypothesis]) -> list[Cause]:
    found = [hypothesis.explain(drift) for hypothesis in hypotheses if hypothesis.applies(drift)]
    return [each for each in found if each is not None]


def _best(causes: Sequence[Cause], floor: float, tie: float = TIE) -> list[Cause]:
    """The cause that explains most, and those that the numbers cannot tell from it, one of each kind.

    They share the confidence: of n causes that explain as much, each is right once in n.
    """
    within = [found for found in causes if found.confidence >= EXPLAINED]
    if not within:
        return []
    least = min(found.after or 0.0 for found in within)
    limit = max(tie * least, floor / 10.0)
    tied = list({found.kind: found for found in reversed(within) if (found.after or 0.0) <= limit}.values())[::-1]
    if len(tied) == 1:
        return tied
    sure = max(found.confidence for found in tied) / len(tied)
    return [dataclasses.replace(found, confidence=sure, says=_tied(found, tied)) for found in tied]


def _tied(found: Cause, tied: Sequence[Cause]) -> str:
    others = ", ".join(other.kind for other in tied if other.kind != found.kind)
    return f"{found.says} (these inputs do not tell it from {others})"
