"""A router that computes or keeps its scores in fewer bits than the source."""

from __future__ import annotations

from collections.abc import Iterator

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.low_precision import MOST_BITS, round_to, significant_bits
from porter.alignment.hypotheses.relation import Finding, Parameter, ParameterHypothesis, relative
from porter.alignment.hypotheses.rounding import HALVES
from porter.alignment.hypotheses.routing import BIAS, PLACES, altered, gates, with_gate
from porter.alignment.hypotheses.trial import Trial, TrialHypothesis


def _trials(drift: Drift) -> Iterator[Trial]:
    if drift.lane != "native":
        return  # Replayed in float64 a router rounds nothing.
    for path, _, gate in gates(drift):
        for form in HALVES:
            for place, words in PLACES.items():
                says = f"The router {words.format(format=form.name)}: compute its scores in float32"
                change = with_gate(path, altered(gate, narrow=(place, form)))
                yield Trial("router-dtype", says, change, part=path, resolves=form.resolves)


def _narrow(drift: Drift, parameter: Parameter) -> Iterator[Finding]:
    """The router's weight or correction bias stored in 16 bits where the source has more."""
    name = parameter.name
    if not (name.endswith(BIAS) or ".gate." in f".{name}" or ".router." in f".{name}"):
        return
    bits = significant_bits(parameter.candidate)
    if bits <= MOST_BITS and bits < significant_bits(parameter.source):
        known = next((f" ({form.name})" for form in HALVES if form.bits == bits), "")
        distinct = parameter.candidate.unique().numel()
        says = (
            f"{name} is stored with {bits} significant bits{known}, {distinct} distinct values for "
            f"{parameter.source.unique().numel()} of the source's: keep the router's tensors in float32"
        )
        yield Finding("router-dtype", relative(round_to(parameter.source, bits), parameter.candidate), says)


HYPOTHESIS = TrialHypothesis(("router-dtype",), _trials)
PARAMETER = ParameterHypothesis(("router-dtype",), _narrow)
