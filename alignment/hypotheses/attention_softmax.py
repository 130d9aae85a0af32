"""Attention weights that are no softmax over the keys: raw logits, another function, another axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import attentions
from porter.alignment.hypotheses.rounding import EIGHTHS, Format, narrower_than
from porter.alignment.hypotheses.surgery import INTERFACES, names_global, wrap_attention
from porter.alignment.hypotheses.trial import Change, Trial, TrialHypothesis
from porter.alignment.observation import MASK_BELOW

Weigh = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits [B, H, S, T], whether the query may see the key) -> the weights that the values are summed with."""


def _exponentials(logits: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    hidden = logits.masked_fill(~seen, -torch.inf)
    return (hidden - hidden.amax(-1, keepdim=True).nan_to_num(0.0, neginf=0.0)).exp()


def _off_by_one(logits: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    exponentials = logits.exp() * seen
    return exponentials / (1.0 + exponentials.sum(-1, keepdim=True))


def _over(dim: int) -> Weigh:
    return lambda logits, seen: logits.masked_fill(~seen, -torch.inf).softmax(dim).nan_to_num(0.0)


WEIGHTS: tuple[tuple[str, Weigh], ...] = (
    ("the logits themselves weigh the values, no softmax is taken", lambda logits, seen: logits * seen),
    ("the logits over the number of keys weigh the values", lambda logits, seen: logits * seen / seen.sum(-1, True)),
    ("sigmoids of the logits weigh the values", lambda logits, seen: logits.sigmoid() * seen),
    ("exponentials weigh the values and are not divided by their sum", lambda logits, seen: logits.exp() * seen),
    ("exponentials of logit - maximum weigh the values and are not divided by their sum", _exponentials),
    ("the softmax has 1 added to its denominator", _off_by_one),
    ("the softmax runs over the queries and not over the keys", _over(-2)),
    ("the softmax runs over the heads and not over the keys", _over(1)),
    ("the softmax is taken twice", lambda logits, seen: _over(-1)(_over(-1)(logits, seen), seen)),
)


def may_see(mask: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
    """Which keys [B, H, S, T] a query may see: by the mask given, else those up to its own, aligned to the end."""
    queries, keys = logits.shape[-2:]
    if mask is None:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=logits.device).tril(keys - queries)
    else:
        seen = mask if mask.dtype == torch.bool else mask > MASK_BELOW
    return seen.expand(logits.shape)


def _weighed_by(path: str, weigh: Weigh) -> Change:
    def wrap(attend: Callable[..., Any]) -> Callable[..., Any]:
        def weighed(
            module: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None = None,
            *_: Any,
            scaling: float | None = None,
            **__: Any,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            groups = query.shape[1] // key.shape[1]
            keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            logits = query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
            weights = weigh(logits, may_see(attention_mask, logits))
            return (weights @ values).transpose(1, 2).contiguous(), weights

        return weighed

    return lambda module: wrap_attention(module.get_submodule(path), wrap)


def _trials(drift: Drift) -> Iterator[Trial]:
    for path, attention in attentions(drift.source_module, drift.forced):
        if names_global(attention, INTERFACES):
            for words, weigh in WEIGHTS:
                says = f"In the attention {words}: take one softmax over the keys that a query may see"
                yield Trial("attention-not-softmaxed", says, _weighed_by(path, weigh), part=path)


def _narrow_trials(drift: Drift) -> Iterator[Trial]:
    for path, attention in attentions(drift.source_module, drift.forced):
        if not names_global(attention, INTERFACES):
            continue
        for form in (*narrower_than(drift.dtype), *EIGHTHS):
            for words, weigh in _rounding(form):
                says = f"Attention keeps its {words} in {form.name}: compute them in float32"
                yield Trial("low-precision", says, _weighed_by(path, weigh), part=path, resolves=form.resolves)


def _rounding(form: Format) -> Iterator[tuple[str, Weigh]]:
    yield "scores", lambda logits, seen: _over(-1)(form(logits), seen)
    yield "probabilities", lambda logits, seen: form(_over(-1)(logits, seen))
    yield "scores and probabilities", lambda logits, seen: form(_over(-1)(form(logits), seen))


NARROW = TrialHypothesis(("low-precision",), _narrow_trials)
HYPOTHESIS = TrialHypothesis(("attention-not-softmaxed",), _trials)
