"""A prefill that sees the wrong keys: no mask, a mask off by one, padding or window ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from porter.alignment.drift import Drift, Inputs
from porter.alignment.hypotheses.anatomy import attentions
from porter.alignment.hypotheses.trial import Trial, TrialHypothesis

Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(query positions [S, 1], key positions [1, T]) -> whether the query sees the key."""

RULES: tuple[tuple[str, Rule], ...] = (
    ("every query sees every key, later ones too: apply the causal mask", lambda q, k: k <= k.max()),
    ("each query sees one key too many, the next token's: the causal mask is off by one", lambda q, k: k <= q + 1),
    ("a query does not see its own key: the causal mask is off by one", lambda q, k: (k < q) | ((q == 0) & (k == 0))),
    ("only the causal rule applies: the mask that is given (padding or window) is ignored", lambda q, k: k <= q),
)
POWERS = tuple(2**exponent for exponent in range(0, 16))


def with_rule(rule: Rule) -> Callable[[tuple[Any, ...], dict[str, Any]], Inputs]:
    """Replaces the attention mask of every call with several queries by the additive mask of `rule`."""

    def change(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        queries = hidden_states.shape[1]
        if queries == 1:
            return args, kwargs
        given = kwargs.get("attention_mask")
        keys = given.shape[-1] if isinstance(given, torch.Tensor) and given.dim() == 4 else queries
        place = torch.arange(keys, device=hidden_states.device)
        seen = rule(place[keys - queries :, None], place[None, :]).expand(queries, keys)
        mask = torch.zeros(1, 1, queries, keys, dtype=hidden_states.dtype, device=hidden_states.device)
        return args, {**kwargs, "attention_mask": mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)}

    return change


def _mask_trials(drift: Drift) -> Iterator[Trial]:
    found = attentions(drift.source_module, drift.forced)
    windowed = any(getattr(attention, "sliding_window", None) is not None for _, attention in found)
    if found:
        # Where the source has a window, the causal rule alone is the window ignored.
        for words, rule in RULES[:-1] if windowed else RULES:
            yield Trial("attention-mask", words[0].upper() + words[1:], inputs=with_rule(rule))
        for place in (power for power in POWERS if 2 < power < _longest(drift)):
            for words, rule in _beyond(place):
                yield Trial(
                    "attention-mask", f"The mask is ignored for {words} from {place} on", inputs=with_rule(rule)
                )


def _beyond(place: int) -> Iterator[tuple[str, Rule]]:
    """A kernel whose mask ends at `place`."""
    yield "keys", lambda q, k: (k <= q) | (k >= place)
    yield "queries", lambda q, k: (k <= q) | (q >= place)


def _padding_trials(drift: Drift) -> Iterator[Trial]:
    if any(keep is not None for keep in drift.keep) and attentions(drift.source_module, drift.forced):
        says = "Padded positions are attended to, only the causal rule applies: hide them by the attention mask"
        yield Trial("padding-rows", says, inputs=with_rule(lambda q, k: k <= q))


def _window(width: int) -> Rule:
    return lambda q, k: (k <= q) & (k > q - width)


def _longest(drift: Drift) -> int:
    """The most tokens of a step: a window as wide hides nothing."""
    padded = [keep.shape[1] for keep in drift.keep if keep is not None]
    return max(
        [*padded, *(seen["output"].shape[-2] for seen in drift.source_output if "output" in seen and not padded)]
    )


def _window_trials(drift: Drift) -> Iterator[Trial]:
    for path, attention in attentions(drift.source_module, drift.forced):
        own = getattr(attention, "sliding_window", None)
        configured = getattr(getattr(attention, "config", None), "sliding_window", None)
        if own is not None:
            says = f"The sliding window of {own} is not applied: attend to the last {own} keys only"
            yield Trial("sliding-window", says, inputs=with_rule(lambda q, k: k <= q), part=path)
        around = {w for w in (own, configured) if w}
        widths = {*POWERS, *around, *(w + d for w in around for d in (-1, 1))} - {own, 0}
        longest = _longest(drift)
        for width in sorted(width for width in widths if width < longest):
            has = f"a window of {own}" if own is not None else "none"
            says = f"Attention is limited to a sliding window of {width} where the source has {has}"
            yield Trial("sliding-window", says, inputs=with_rule(_window(width)), part=path)


PADDING = TrialHypothesis(("padding-rows",), _padding_trials)
MASK = TrialHypothesis(("attention-mask",), _mask_trials)
WINDOW = TrialHypothesis(("sliding-window",), _window_trials)
