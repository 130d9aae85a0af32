"""Router weights renormalised or not, scaled or not, or scored by the other function."""

from __future__ import annotations

from collections.abc import Iterator

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.routing import Gate, altered, gates, with_gate
from porter.alignment.hypotheses.trial import Trial, TrialHypothesis


def _renormalisation(drift: Drift) -> Iterator[Trial]:
    for path, _, gate in gates(drift):
        if gate.renormalize:
            says = "The weights of the chosen experts are not renormalised to sum to 1: divide them by their sum"
        else:
            says = "The weights of the chosen experts are renormalised and should not be: norm_topk_prob is false"
        change = with_gate(path, altered(gate, renormalize=not gate.renormalize))
        yield Trial("router-renormalisation", says, change, part=path)


def _scale(drift: Drift) -> Iterator[Trial]:
    for path, _, gate in gates(drift):
        for scale, how in _scales(gate):
            says = f"routed_scaling_factor ({gate.scale:g}) is {how}: multiply the routing weights by it once"
            yield Trial("router-scale", says, with_gate(path, altered(gate, scale=scale)), part=path)


def _scales(gate: Gate) -> Iterator[tuple[float, str]]:
    if gate.scale != 1.0:
        yield 1.0, "not applied"
        yield gate.scale**2, "applied twice"
        yield 1.0 / gate.scale, "divided by"


def _score(drift: Drift) -> Iterator[Trial]:
    for path, _, gate in gates(drift):
        other = "softmax" if gate.score == "sigmoid" else "sigmoid"
        says = f"Router logits become scores by {other} where the source uses {gate.score}: use {gate.score}"
        yield Trial("activation", says, with_gate(path, altered(gate, score=other)), part=path)


RENORMALISATION = TrialHypothesis(("router-renormalisation",), _renormalisation)
SCALE = TrialHypothesis(("router-scale",), _scale)
SCORE = TrialHypothesis(("activation",), _score)
