"""The gate of a mixture of experts, written out so that each of its known mistakes is one option."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import routers
from porter.alignment.hypotheses.rounding import Format
from porter.alignment.hypotheses.surgery import rebind_forward
from porter.alignment.hypotheses.trial import Change, distance

BIAS = "e_score_correction_bias"
PLACES = {
    "logits": "rounds its logits to {format}",
    "inputs": "takes hidden states and weight in {format}",
    "product": "multiplies hidden states and weight in {format}, and keeps its logits in it",
    "all": "computes logits and scores in {format}",
    "scores": "rounds its scores to {format} before it chooses",
    "operator": "is one operator in {format}: logits, correction bias and weights are rounded to it",
}
"""Where a router may round, and how a user is told."""


@dataclass(frozen=True)
class Gate:
    """What a top-k gate does; the defaults of `gate_of` reproduce the source."""

    top_k: int
    score: Literal["softmax", "sigmoid"]
    renormalize: bool
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    group_score: Literal["top2", "max"] = "top2"
    excluded: float = float("-inf")
    """What the scores of groups that were not kept are set to."""
    bias_selects: bool = True
    bias_weighs: bool = False
    narrow: tuple[str, Format] | None = None
    """One of PLACES and the format that it rounds to."""

    def __call__(self, module: nn.Module, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        """(logits [T, E], weights [T, k], indices [T, k]) as transformers' routers return them."""
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        operands, result = (("product", "all", "operator", place) for place in ("inputs", "logits"))
        hidden = self._rounded(hidden_states.reshape(-1, weight.shape[1]).to(weight.dtype), *operands)
        logits = self._rounded(hidden @ self._rounded(weight, *operands).t(), *result)
        scores = logits.sigmoid() if self.score == "sigmoid" else logits.softmax(dim=-1)
        scores = self._rounded(scores, "scores", "all")
        bias = module._buffers.get(BIAS, module._parameters.get(BIAS))
        biased = scores if bias is None else scores + self._rounded(bias.to(scores.dtype), "operator")
        choices = self._choice(biased if self.bias_selects else scores)
        indices = choices.topk(self.top_k, dim=-1, sorted=False)[1]
        weights = (biased if self.bias_weighs else scores).gather(1, indices)
        if self.renormalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + (1e-20 if self.score == "sigmoid" else 0.0))
        return logits, self._rounded(weights * self.scale, "operator"), indices

    def _rounded(self, values: torch.Tensor, *places: str) -> torch.Tensor:
        return self.narrow[1](values) if self.narrow is not None and self.narrow[0] in places else values

    def _choice(self, scores: torch.Tensor) -> torch.Tensor:
        if self.groups <= 1 or self.groups_kept >= self.groups:
            return scores
        grouped = scores.unflatten(-1, (self.groups, -1))
        best = (
            grouped.topk(min(2, grouped.shape[-1]), dim=-1)[0] if self.group_score == "top2" else grouped.amax(-1, True)
        )
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool)
        kept.scatter_(1, best.sum(dim=-1).topk(self.groups_kept, dim=-1, sorted=False)[1], True)
        limited: torch.Tensor = grouped.masked_fill(~kept.unsqueeze(-1), self.excluded).flatten(-2)
        return limited


def gate_of(router: nn.Module) -> Gate:
    """The gate that a transformers router describes by its attributes."""
    method = router.__dict__.get("topk_method")
    biased = BIAS in router._buffers or BIAS in router._parameters
    sigmoid = biased or (method is None and hasattr(router, "routed_scaling_factor"))
    attribute = router.__dict__.get
    grouped = method != "greedy"
    return Gate(
        top_k=int(attribute("top_k", 1)),
        score="sigmoid" if sigmoid else "softmax",
        # DeepSeek-V2, the family with a topk_method, scales its softmax scores and never renormalises them.
        renormalize=bool(attribute("norm_topk_prob", method is None)),
        scale=float(attribute("routed_scaling_factor", 1.0)),
        groups=int(attribute("num_group", None) or 1) if grouped else 1,
        groups_kept=int(attribute("topk_group", None) or 1) if grouped else 1,
        group_score="max" if method == "group_limited_greedy" else "top2",
        excluded=0.0 if method == "group_limited_greedy" else float("-inf"),
    )


def with_gate(path: str, gate: Gate) -> Change:
    """Makes the router at `path` compute `gate`."""

    # Routers by token id are given the ids too.
    def forward(self: nn.Module, hidden_states: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gate(self, hidden_states)

    return lambda module: rebind_forward(module.get_submodule(path), forward)


def gates(drift: Drift) -> Iterator[tuple[str, nn.Module, Gate]]:
    """The routers of the source that `Gate` reproduces: leaving the source's own output where it was."""
    for path, router in routers(drift.source_module, drift.forced):
        gate = gate_of(router)
        if abs(distance(drift, with_gate(path, gate)) - drift.before) <= 1e-9 + 1e-6 * drift.before:
            yield path, router, gate


def altered(gate: Gate, **options: Any) -> Gate:
    """The gate with some options changed."""
    return replace(gate, **options)
