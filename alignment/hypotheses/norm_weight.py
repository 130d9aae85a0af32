"""A norm whose weight is taken as w for 1 + w or the reverse, is not applied, or that is missing altogether."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import norms
from porter.alignment.hypotheses.surgery import map_output, rebind_forward, set_parameter, shallow_copy
from porter.alignment.hypotheses.trial import Change, Trial, TrialHypothesis


def is_zero_centred(norm: nn.Module) -> bool:
    """Whether the norm scales by 1 + w: with w = 0 its output does not vanish."""
    weight = norm.get_parameter("weight")
    copied = shallow_copy(norm)
    set_parameter(copied, "weight", torch.zeros_like(weight))
    ones = torch.ones(1, weight.shape[0], dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        return bool(copied(*(ones, ones) if takes_gate(norm) else (ones,)).abs().sum() > 0)


def takes_gate(norm: nn.Module) -> bool:
    """Whether the norm multiplies by an activated gate, its second argument."""
    return "gate" in inspect.signature(type(norm).forward).parameters


def _add_to_weight(path: str, amount: float) -> Change:
    def change(module: nn.Module) -> None:
        norm = module.get_submodule(path)
        set_parameter(norm, "weight", norm.get_parameter("weight") + amount)

    return change


def _fill_weight(path: str, value: float) -> Change:
    def change(module: nn.Module) -> None:
        norm = module.get_submodule(path)
        set_parameter(norm, "weight", torch.full_like(norm.get_parameter("weight"), value))

    return change


def _identity(path: str) -> Change:
    def same(_module: nn.Module, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states

    return lambda module: rebind_forward(module.get_submodule(path), same)


def _doubled(path: str) -> Change:
    def change(module: nn.Module) -> None:
        norm = module.get_submodule(path)
        again: Callable[..., torch.Tensor] = shallow_copy(norm)
        map_output(norm, lambda output: again(output))

    return change


def _trials(drift: Drift) -> Iterator[Trial]:
    for path, norm in norms(drift.source_module, drift.forced):
        name = path or "the norm"
        zero_centred = is_zero_centred(norm)
        if zero_centred:
            says = f"{name} multiplies by w where the source multiplies by 1 + w: use rms_norm/zero_centered"
            yield Trial("norm-zero-centred", says, _add_to_weight(path, -1.0), part=path)
        else:
            says = f"{name} multiplies by 1 + w where the source multiplies by w: use rms_norm/standard"
            yield Trial("norm-zero-centred", says, _add_to_weight(path, 1.0), part=path)
        says = f"{name} is not applied: its input passes through unchanged"
        yield Trial("norm-missing", says, _identity(path), part=path)
        says = f"{name} normalises but does not apply its weight: load {name}.weight"
        yield Trial("norm-missing", says, _fill_weight(path, 0.0 if zero_centred else 1.0), part=path)
        if not takes_gate(norm):
            yield Trial("norm-missing", f"{name} is applied twice: remove one of the two", _doubled(path), part=path)


HYPOTHESIS = TrialHypothesis(("norm-zero-centred", "norm-missing"), _trials)
