"""A norm that rounds elsewhere than the source: casts before or after its weight, squares or sums in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import eps_name, norms
from porter.alignment.hypotheses.norm_weight import is_zero_centred, takes_gate
from porter.alignment.hypotheses.rounding import HALVES, OF_DTYPE, Format
from porter.alignment.hypotheses.surgery import rebind_forward
from porter.alignment.hypotheses.trial import Change, Trial, TrialHypothesis

Normalise = Callable[[torch.Tensor, torch.Tensor, float, Format], torch.Tensor]
"""(x [..., H], weight [H], eps, format) -> the normed x, rounded where this order of casts rounds."""


def _cast_first(x: torch.Tensor, weight: torch.Tensor, eps: float, cast: Format) -> torch.Tensor:
    return cast(weight * cast(x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()))


def _cast_last(x: torch.Tensor, weight: torch.Tensor, eps: float, cast: Format) -> torch.Tensor:
    return cast(weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt())


def _squared_narrow(x: torch.Tensor, weight: torch.Tensor, eps: float, cast: Format) -> torch.Tensor:
    variance = cast(cast(x.square()).mean(-1, keepdim=True))
    return cast(weight * cast(x * cast(cast(variance + eps).rsqrt())))


def _summed_narrow(x: torch.Tensor, weight: torch.Tensor, eps: float, cast: Format) -> torch.Tensor:
    squares = cast(x.square())
    total = torch.zeros_like(squares[..., 0])
    for column in squares.unbind(-1):
        total = cast(total + column)
    variance = cast(total[..., None] / x.shape[-1])
    return cast(weight * cast(x * cast(cast(variance + eps).rsqrt())))


ORDERS: tuple[tuple[str, Normalise], ...] = (
    ("is rounded to {format} after the weight and not before it: cast, then multiply by the weight", _cast_last),
    ("is rounded to {format} before it is multiplied by its weight: multiply first, then cast", _cast_first),
    ("squares and averages in {format}: compute the variance in float32", _squared_narrow),
    ("accumulates its sum of squares in {format}: accumulate in float32", _summed_narrow),
)


def _in_order(path: str, zero_centred: bool, normalise: Normalise, cast: Format) -> Change:
    def change(module: nn.Module) -> None:
        norm = module.get_submodule(path)
        eps = float(getattr(norm, eps_name(norm) or ""))
        weight = norm.get_parameter("weight") + (1.0 if zero_centred else 0.0)

        def forward(self: nn.Module, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return normalise(cast(hidden_states), weight, eps, cast)

        rebind_forward(norm, forward)

    return change


def _trials(drift: Drift) -> Iterator[Trial]:
    if drift.lane != "native":
        return  # In float64 nothing rounds, and every order of casts is the same.
    formats = {form.name: form for form in (OF_DTYPE.get(drift.dtype), *HALVES) if form is not None}
    for path, norm in norms(drift.source_module):
        if takes_gate(norm):
            continue
        zero_centred = is_zero_centred(norm)
        for form in formats.values():
            for words, normalise in ORDERS:
                says = f"{path or 'The norm'} {words.format(format=form.name)}"
                yield Trial("norm-cast-order", says, _in_order(path, zero_centred, normalise, form), part=path)


HYPOTHESIS = TrialHypothesis(("norm-cast-order",), _trials)
