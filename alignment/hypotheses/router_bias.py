"""The router's correction bias left out of the choice of experts, or leaked into their weights."""

from __future__ import annotations

from collections.abc import Iterator

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.routing import BIAS, altered, gates, with_gate
from porter.alignment.hypotheses.trial import Trial, TrialHypothesis

LEAKED = (
    f"{BIAS} leaks into the weights of the chosen experts: use it to choose only, and gather the weights "
    "from the scores without it"
)
MISSING = f"{BIAS} is not added to the scores that choose the experts: add it before the top-k"
BOTH = f"{BIAS} weighs the chosen experts but does not choose them: it must do the reverse"


def _trials(drift: Drift) -> Iterator[Trial]:
    for path, router, gate in gates(drift):
        if BIAS in router._buffers or BIAS in router._parameters:
            yield Trial("router-bias", LEAKED, with_gate(path, altered(gate, bias_weighs=True)), part=path)
            yield Trial("router-bias", MISSING, with_gate(path, altered(gate, bias_selects=False)), part=path)
            both = altered(gate, bias_selects=False, bias_weighs=True)
            yield Trial("router-bias", BOTH, with_gate(path, both), part=path)


HYPOTHESIS = TrialHypothesis(("router-bias",), _trials)
