"""A prefill that sees the wrong keys: no mask, a mask off by one, padding or window ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from porter.alignment.drift import Drift, Inputs
from porter.alignment.hypotheses.anatomy import attentions
from porter.alignment.hypotheses.surgery import INTERFACES, names_global, wrap_attention
from porter.alignment.hypotheses.trial import Change, Trial, TrialHypothesis
from porter.alignment.observation import HIDES_BELOW

Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(query positions [S, 1], key positions [1, T]) -> whether the query sees the key."""

RULES: tuple[tuple[str, Rule], ...] = (
    ("every query sees every key, later ones too: apply the causal mask", lambda q, k: k <= k.max()),
    ("each query sees one key too many, the next token's: the causal mask is off by one", lambda q, k: k <= q + 1),
    ("a query does not see its own key: the causal mask is off by one", lambda q, k: (k < q) | ((q == 0) & (k == 0))),
    (
        "no query but the first sees the first key: the mask starts one late",
        lambda q, k: (k <= q) & ((k > 0) | (q == 0)),
    ),
)
IGNORED: tuple[str, Rule] = (
    "only the causal rule applies: the mask that is given (padding or window) is ignored",
    lambda q, k: k <= q,
)
SHORT = 64
"""Tokens up to which every size is tried."""
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


def seeing(path: str, rule: Rule, decode: bool = True) -> Change:
    """The attention at `path` lets through what `rule` says, and of padding nothing; in steps of one query only where
    `decode`. Positions are counted in the cache, which of a sliding window holds the last keys."""

    def wrap(attend: Callable[..., Any]) -> Callable[..., Any]:
        def attend_by_rule(
            module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None, **rest: Any
        ) -> Any:
            queries, keys = query.shape[2], key.shape[2]
            if queries == 1 and not decode:
                return attend(module, query, key, value, mask, **rest)
            place = torch.arange(keys, device=query.device)
            seen = rule(place[keys - queries :, None], place[None, :]).expand(1, 1, queries, keys)
            if isinstance(mask, torch.Tensor) and getattr(module, "sliding_window", None) is None:
                given = mask if mask.dtype == torch.bool else mask > HIDES_BELOW
                seen = seen & given.any(-2, keepdim=True)[..., :keys]
            added = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
            return attend(module, query, key, value, added.masked_fill(~seen, torch.finfo(query.dtype).min), **rest)

        return attend_by_rule

    return lambda module: wrap_attention(module.get_submodule(path), wrap)


def _ruled(drift: Drift, kind: str, says: str, path: str, rule: Rule) -> Iterator[Trial]:
    """The rule in every step, and in the prefill alone."""
    if names_global(drift.source_module.get_submodule(path), INTERFACES):
        if len(drift.source_output) > 1:
            yield Trial(kind, says, seeing(path, rule), part=path)
        yield Trial(kind, says, seeing(path, rule, decode=False), part=path)
    else:
        yield Trial(kind, says, inputs=with_rule(rule), part=path)


def _mask_trials(drift: Drift) -> Iterator[Trial]:
    for path, attention in attentions(drift.source_module, drift.forced):
        windowed = getattr(attention, "sliding_window", None) is not None
        for words, rule in RULES:
            yield from _ruled(drift, "attention-mask", words[0].upper() + words[1:], path, rule)
        if not windowed:
            # Where the source has a window, the causal rule alone is the window ignored.
            words, rule = IGNORED
            yield Trial("attention-mask", words[0].upper() + words[1:], inputs=with_rule(rule), part=path)
        for place in (power for power in POWERS if 2 < power < _longest(drift)):
            yield from _beyond(drift, path, place)


def _beyond(drift: Drift, path: str, place: int) -> Iterator[Trial]:
    """A kernel whose mask ends at `place`."""
    for words, rule in (
        ("keys", lambda q, k: (k <= q) | (k >= place)),
        ("queries", lambda q, k: (k <= q) | (q >= place)),
    ):
        yield from _ruled(drift, "attention-mask", f"The mask is ignored for {words} from {place} on", path, rule)


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
        [*padded, *(seen["output"].shape[-2] for seen in drift.source_output if "output" in seen and not padded)],
        default=0,
    )


def _window_trials(drift: Drift) -> Iterator[Trial]:
    for path, attention in attentions(drift.source_module, drift.forced):
        own = getattr(attention, "sliding_window", None)
        configured = getattr(getattr(attention, "config", None), "sliding_window", None)
        if own is not None:
            says = f"The sliding window of {own} is not applied: attend to the last {own} keys only"
            yield from _ruled(drift, "sliding-window", says, path, IGNORED[1])
        around = {w for w in (own, configured) if w}
        widths = {*POWERS, *around, *(w + d for w in around for d in (-1, 1))} - {own, 0}
        longest = _longest(drift)
        for width in sorted(width for width in widths if width < longest):
            yield from _of_width(drift, path, width)


def _of_width(drift: Drift, path: str, width: int) -> Iterator[Trial]:
    own = getattr(drift.source_module.get_submodule(path), "sliding_window", None)
    has = f"a window of {own}" if own is not None else "none"
    says = f"Attention is limited to a sliding window of {width} where the source has {has}"
    yield from _ruled(drift, "sliding-window", says, path, _window(width))


def _place_trials(drift: Drift) -> Iterator[Trial]:
    """Windows and ends of masks of any size, where sequences are short; of long ones those at the first token that
    differs, for query w is the first that a window of w keeps from a key."""
    longest = _longest(drift)
    first = _first_differing(drift)
    near = {} if first is None else {first - 1, first, first + 1}
    places = set(range(1, longest)) if longest <= SHORT else {place for place in near if 0 < place < longest}
    for path, _ in attentions(drift.source_module, drift.forced):
        for place in sorted(places):
            yield from _of_width(drift, path, place)
            yield from _beyond(drift, path, place)


def _first_differing(drift: Drift) -> int | None:
    """The first token of the prefill [B, S, ...] that is off by more than the floor."""
    mine, theirs = (seen[0].get(drift.tensor) for seen in (drift.candidate_output, drift.source_output))
    if mine is None or theirs is None or mine.dim() < 3 or mine.shape != theirs.shape:
        return None
    error, size = ((t.movedim(1, 0).flatten(1)).norm(dim=1) for t in (mine - theirs, theirs))
    differing = (error > drift.floor * size).nonzero().flatten()
    return int(differing[0]) if len(differing) else None


PADDING = TrialHypothesis(("padding-rows",), _padding_trials)
MASK = TrialHypothesis(("attention-mask",), _mask_trials)
PLACE = TrialHypothesis(("sliding-window", "attention-mask"), _place_trials)
WINDOW = TrialHypothesis(("sliding-window",), _window_trials)
