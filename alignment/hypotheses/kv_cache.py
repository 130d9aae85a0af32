"""Decoding on a key-value cache that is not what the steps before left: entries missing, overwritten, exchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import attentions
from porter.alignment.hypotheses.rounding import EIGHTHS
from porter.alignment.hypotheses.surgery import INTERFACES, names_global, wrap_attention
from porter.alignment.hypotheses.trial import Change, Outcome, Trial, TrialHypothesis, cause, distance, solve
from porter.alignment.observation import Observation, worst
from porter.alignment.report import Cause

Read = Callable[[torch.Tensor, int], torch.Tensor]
"""(what a decode step should read [B, H, T, D], length of the prefill) -> what it reads."""


def _without(states: torch.Tensor, place: int) -> torch.Tensor:
    place %= states.shape[2]
    return torch.cat((states[:, :, :place], states[:, :, place + 1 :]), dim=2)


def _filled(states: torch.Tensor, place: int | slice, value: torch.Tensor | float) -> torch.Tensor:
    changed = states.clone()
    changed[:, :, place] = value
    return changed


def _past_of_next_row(states: torch.Tensor, prefill: int) -> torch.Tensor:
    return torch.cat((states[:, :, :-1].roll(-1, 0), states[:, :, -1:]), dim=2)


SHORTENED: tuple[tuple[str, Read], ...] = (
    ("does not see its own key and value: append before reading", lambda s, p: _without(s, -1)),
    ("does not see the token before it: the cache is read one entry short", lambda s, p: _without(s, -2)),
    ("sees the prefill and itself, no earlier decode step: append each step's", lambda s, p: _after_prefill(s, p)),
    ("does not see the prefill: carry its keys and values over", lambda s, p: s[:, :, p:]),
    ("sees nothing but itself: the cache is empty", lambda s, p: s[:, :, -1:]),
    ("does not see the first token: the cache starts one late", lambda s, p: s[:, :, 1:]),
)
"""Keys and values alike are missing."""

OVERWRITTEN: tuple[tuple[str, Read], ...] = (
    ("reads zeros in the place of its own token: it is written after it is read", lambda s, p: _filled(s, -1, 0.0)),
    ("reads its predecessor's entry again in its own place", lambda s, p: _filled(s, -1, s[:, :, -2])),
    ("reads its own entry in its predecessor's place, which it overwrote", lambda s, p: _filled(s, -2, s[:, :, -1])),
    ("reads zeros for the token before it: its entry was never written", lambda s, p: _filled(s, -2, 0.0)),
    ("reads its own entry in the first place: it wraps around too early", lambda s, p: _filled(s, 0, s[:, :, -1])),
    ("reads zeros for every earlier step: their entries are wiped", lambda s, p: _filled(s, slice(p, -1), 0.0)),
    (
        "reads zeros for what was the last entry at each earlier step: it is wiped before the next is appended",
        lambda s, p: _filled(s, slice(p - 1, -1), 0.0),
    ),
    ("reads the cache of another row of the batch", _past_of_next_row),
    ("reads the cache of another row of the batch, its own entry too", lambda s, p: s.roll(-1, 0)),
)
"""Entries hold something else; it may be that of the keys or of the values alone."""

WHICH = (("", (True, True)), (" (its keys alone)", (True, False)), (" (its values alone)", (False, True)))


def _after_prefill(states: torch.Tensor, prefill: int) -> torch.Tensor:
    return torch.cat((states[:, :, :prefill], states[:, :, -1:]), dim=2)


def _stale(path: str, read: Read, keys: bool, values: bool, shortens: bool) -> Change:
    """Decode steps read their keys, values or both through `read`; where it drops entries the mask loses them too."""

    prefill = [0]  # The attention function is wrapped anew in every call.

    def wrap(attend: Callable[..., Any]) -> Callable[..., Any]:
        def attend_stale(
            module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None, **rest: Any
        ) -> Any:
            if query.shape[2] > 1:
                prefill[0] = key.shape[2]
            elif key.shape[2] > 2:
                key = read(key, prefill[0]) if keys else key
                value = read(value, prefill[0]) if values else value
                if shortens and isinstance(mask, torch.Tensor):
                    mask = read(mask.transpose(2, 3), prefill[0]).transpose(2, 3)
            return attend(module, query, key, value, mask, **rest)

        return attend_stale

    return lambda module: wrap_attention(module.get_submodule(path), wrap)


def _stored(path: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Keys and values pass through `change` before every step reads them."""

    def wrap(attend: Callable[..., Any]) -> Callable[..., Any]:
        def attend_stored(
            module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any
        ) -> Any:
            return attend(module, query, change(key), change(value), *rest, **options)

        return attend_stored

    return lambda module: wrap_attention(module.get_submodule(path), wrap)


def _stale_trials(drift: Drift) -> Iterator[Trial]:
    for path, attention in attentions(drift.source_module, drift.forced):
        if not names_global(attention, INTERFACES):
            continue
        for words, read in SHORTENED:
            change = _stale(path, read, True, True, True)
            yield Trial("kv-cache-stale", f"A decode step {words}", change, part=path)
        for words, read in OVERWRITTEN:
            for which, (keys, values) in WHICH:
                change = _stale(path, read, keys, values, False)
                yield Trial("kv-cache-stale", f"A decode step {words}{which}", change, part=path)


def _narrow_trials(drift: Drift) -> Iterator[Trial]:
    for path, attention in attentions(drift.source_module, drift.forced):
        if names_global(attention, INTERFACES):
            for form in EIGHTHS:
                says = f"Keys and values are stored as {form.name} without a scale: keep them in the model's dtype"
                yield Trial("low-precision", says, _stored(path, form), part=path)


def _past_times(path: str, keys: float, values: float) -> Change:
    """A decode step finds what earlier steps stored times a factor."""

    def times(states: torch.Tensor, factor: float) -> torch.Tensor:
        return torch.cat((states[:, :, :-1] * factor, states[:, :, -1:]), dim=2)

    def wrap(attend: Callable[..., Any]) -> Callable[..., Any]:
        def attend_scaled(
            module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any
        ) -> Any:
            if query.shape[2] == 1:
                key, value = times(key, keys), times(value, values)
            return attend(module, query, key, value, *rest, **options)

        return attend_scaled

    return lambda module: wrap_attention(module.get_submodule(path), wrap)


def _both(drift: Drift) -> Iterator[tuple[Observation, Observation]]:
    """Candidate and source, step by step."""
    return zip(drift.candidate_output, drift.source_output, strict=False)


@dataclass(frozen=True)
class CacheScale:
    """Keys and values of earlier steps are read back times a constant: the scale that they were stored by is lost."""

    kinds: tuple[str, ...] = ("scale-missing",)

    def applies(self, drift: Drift) -> bool:
        """Whether an attention decodes, and only its decode steps differ."""
        steps = [worst([mine], [theirs])[1] for mine, theirs in _both(drift)]
        decodes = len(steps) > 1 and steps[0] <= drift.floor and max(steps[1:]) > drift.floor
        return decodes and any(True for _ in self._paths(drift))

    def explain(self, drift: Drift) -> Cause | None:
        """The factors that come closest: one for both, for the keys or the values alone, or one for each."""
        found = [self._solved(drift, path) for path in self._paths(drift)]
        return cause(drift, min(found, key=lambda outcome: outcome.after, default=None))

    def _solved(self, drift: Drift, path: str) -> Outcome:
        def at(keys: float, values: float) -> float:
            return distance(drift, _past_times(path, keys, values))

        both, after = solve(lambda c: at(c, c), FACTORS)
        keys = values = both
        if after > drift.floor:
            keys, values = min(((c, 1.0) for c in FACTORS), key=lambda pair: at(*pair))
            for _ in range(ROUNDS):
                values, _ = solve(partial(at, keys), FACTORS)
                keys, after = solve(partial(_swapped, at, values), FACTORS)
                if after <= drift.floor:
                    break
        says = (
            f"Decode steps find earlier keys times {keys:.6g} and values times {values:.6g}: the scale by which the "
            "cache stores them is not applied when they are read (or twice)"
        )
        return Outcome(Trial("scale-missing", says, part=path), after)

    def _paths(self, drift: Drift) -> Iterator[str]:
        for path, attention in attentions(drift.source_module, drift.forced):
            if names_global(attention, INTERFACES):
                yield path


def _swapped(at: Callable[[float, float], float], values: float, keys: float) -> float:
    return at(keys, values)


FACTORS = tuple(2.0**exponent for exponent in range(-9, 10))
ROUNDS = 3

SCALE = CacheScale()
STALE = TrialHypothesis(("kv-cache-stale",), _stale_trials)
NARROW = TrialHypothesis(("low-precision",), _narrow_trials)
