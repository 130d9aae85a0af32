"""Router weights renormalised or not, scaled or not, or scored by the other function."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.routing import Gate, altered, gates, with_gate
from porter.alignment.hypotheses.surgery import rebind_forward
from porter.alignment.hypotheses.trial import Change, Trial, TrialHypothesis


def _renormalisation(drift: Drift) -> Iterator[Trial]:
    for path, _, gate in gates(drift):
        if gate.renormalize:
            says = "The weights of the chosen experts are not renormalised to sum to 1: divide them by their sum"
        else:
            says = "The weights of the chosen experts are renormalised and should not be: norm_topk_prob is false"
        change = with_gate(path, altered(gate, renormalize=not gate.renormalize))
        yield Trial("router-renormalisation", says, change, part=path)
        for words, weigh in OF_LOGITS:
            says = f"The chosen experts' weights are {words}: wrong where logits are negative; use their probabilities"
            yield Trial("router-renormalisation", says, _weighed(path, gate, weigh), part=path)


Weigh = Callable[[torch.Tensor], torch.Tensor]

OF_LOGITS: tuple[tuple[str, Weigh], ...] = (
    (
        "their positive logits over the sum of these",
        lambda x: x.clamp(min=0) / x.clamp(min=0).sum(-1, True).clamp(1e-6),
    ),
    ("their logits over the sum of these", lambda x: x / x.sum(-1, keepdim=True)),
    ("a softmax of logits of which negative ones count as 0", lambda x: x.clamp(min=0).softmax(-1)),
)
"""What kernels make of the logits of the chosen experts [T, k]."""


def _weighed(path: str, gate: Gate, weigh: Weigh) -> Change:
    def forward(self: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, _, indices = gate(self, hidden_states)
        return logits, weigh(logits.gather(1, indices)) * gate.scale, indices

    return lambda module: rebind_forward(module.get_submodule(path), forward)


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
        # Operators divide by the sum in one of their modes alone.
        whether = "not " if gate.renormalize else ""
        says = f"{says}, and the weights are {whether}divided by their sum"
        change = with_gate(path, altered(gate, score=other, renormalize=not gate.renormalize))
        yield Trial("activation", says, change, part=path)


RENORMALISATION = TrialHypothesis(("router-renormalisation",), _renormalisation)
SCALE = TrialHypothesis(("router-scale",), _scale)
SCORE = TrialHypothesis(("activation",), _score)
