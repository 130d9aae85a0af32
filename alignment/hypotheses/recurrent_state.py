"""The state of linear attention between steps: kept in fewer bits, not carried over, or carried where it must not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import recurrences
from porter.alignment.hypotheses.rounding import E4M3, FLOAT32, HALVES
from porter.alignment.hypotheses.trial import Change, Trial, TrialHypothesis
from porter.alignment.report import Cause

States = dict[str, torch.Tensor]
"""A layer's states by kind: "recurrent" and "conv"."""
Keep = Callable[[States, States, int], None]
"""(states in place, states as the prefill left them, tokens in this step) -> changes the first."""

KINDS = {"recurrent": "recurrent_states", "conv": "conv_states"}


def states_of(module: nn.Module, kwargs: dict[str, Any]) -> States:
    """The tensors that the cache among `kwargs` keeps for a layer of linear attention; none before the first step."""
    layers: Any = next((each.layers for each in kwargs.values() if hasattr(each, "layers")), ())
    index = int(getattr(module, "layer_idx", 0))
    layer = layers[index] if index < len(layers) else None
    found = {kind: getattr(layer, name, None) or {} for kind, name in KINDS.items()}
    return {kind: states[0] for kind, states in found.items() if isinstance(states.get(0), torch.Tensor)}


def _before(path: str, keep: Keep) -> Change:
    """Every call finds the states changed by `keep`."""
    return lambda module: _hooked(module.get_submodule(path), keep, after=False)


def _after(path: str, keep: Keep) -> Change:
    """Every call leaves the states changed by `keep`."""
    return lambda module: _hooked(module.get_submodule(path), keep, after=True)


def _hooked(mixer: nn.Module, keep: Keep, after: bool) -> None:
    left: States = {}

    def tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        return int((args[0] if args else kwargs["hidden_states"]).shape[1])

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not after:
            keep(states_of(module, kwargs), left, tokens(args, kwargs))

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        states, count = states_of(module, kwargs), tokens(args, kwargs)
        if count > 1:
            left.update({kind: state.clone() for kind, state in states.items()})
        if after:
            keep(states, left, count)

    mixer.register_forward_pre_hook(enter, with_kwargs=True)
    mixer.register_forward_hook(leave, with_kwargs=True)


def _on(kinds: tuple[str, ...], change: Callable[[torch.Tensor], torch.Tensor], decode: bool = True) -> Keep:
    def keep(states: States, left: States, tokens: int) -> None:
        for kind in kinds:
            if kind in states and (tokens == 1 or not decode):
                states[kind].copy_(change(states[kind]))

    return keep


def _frozen(states: States, left: States, tokens: int) -> None:
    if tokens == 1:
        for kind, state in states.items():
            state.copy_(left.get(kind, state))


def _dtype_trials(drift: Drift) -> Iterator[Trial]:
    wide = (FLOAT32,) if drift.dtype == torch.float64 else ()
    for path, _ in recurrences(drift.source_module, drift.forced):
        for form in (*HALVES, E4M3, *wide):
            for kind in KINDS:
                says = f"The {kind} state is stored as {form.name} after each step: keep it in float32"
                yield Trial("state-dtype", says, _after(path, _on((kind,), form, decode=False)), part=path)


RESETS: tuple[tuple[str, Keep], ...] = (
    ("Decode steps start from an empty recurrent state: carry it over", _on(("recurrent",), torch.zeros_like)),
    ("Decode steps start from an empty convolution state: carry it over", _on(("conv",), torch.zeros_like)),
    ("Decode steps start from empty states: carry both over", _on(("recurrent", "conv"), torch.zeros_like)),
    ("Decode steps all start from the state that the prefill left: write the new one back", _frozen),
    (
        "Decode steps find the states of another row of the batch",
        _on(("recurrent", "conv"), lambda state: state.roll(1, 0)),
    ),
    (
        "The recurrent state is found transposed (keys by values): the layouts differ",
        _on(("recurrent",), lambda s: s.transpose(-1, -2).clone() if s.shape[-1] == s.shape[-2] else s),
    ),
)


def _reset_trials(drift: Drift) -> Iterator[Trial]:
    for path, _ in recurrences(drift.source_module, drift.forced):
        for says, keep in RESETS:
            yield Trial("state-reset", says, _before(path, keep), part=path)


@dataclass(frozen=True)
class NarrowState:
    """States themselves, compared after every step, hold fewer bits than the source's; outputs do not show it yet."""

    kinds: tuple[str, ...] = ("state-dtype", "low-precision")

    def applies(self, drift: Drift) -> bool:
        """Whether that alone is over budget."""
        return bool(drift.states)

    def explain(self, drift: Drift) -> Cause | None:
        """Which state, and what it is kept in."""
        kind = "state-dtype" if any("states" in state for state in drift.states) else "low-precision"
        says = f"It keeps its {' and its '.join(drift.states)}, fewer bits than the source's: the error adds up"
        return Cause(kind, drift.module, 0.95, drift.before, None, f"{says} over hundreds of steps")


STORED = NarrowState()
DTYPE = TrialHypothesis(("state-dtype",), _dtype_trials)
RESET = TrialHypothesis(("state-reset",), _reset_trials)
