"""A norm that rounds elsewhere than the source: casts before or after its weight, squares or sums in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import eps_name, norms
from porter.alignment.hypotheses.norm_weight import is_zero_centred, takes_gate
from porter.alignment.hypotheses.rounding import HALVES, OF_DTYPE, Format, held_in
from porter.alignment.hypotheses.surgery import rebind_forward
from porter.alignment.hypotheses.trial import Change, Trial, TrialHypothesis

Normalise = Callable[[torch.Tensor, torch.Tensor, float, Format], torch.Tensor]
"""(x [..., H], weight [H], eps, format) -> the normed x, rounded where this order of casts rounds."""


def _cast_first(x: torch.Tensor, weight: torch.Tensor, eps: float, cast: Format) -> torch.Tensor:
    return cast(cast(weight) * cast(x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()))


def _cast_last(x: torch.Tensor, weight: torch.Tensor, eps: float, cast: Format) -> torch.Tensor:
    return cast(weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt())


def _squared_narrow(x: torch.Tensor, weight: torch.Tensor, eps: float, cast: Format) -> torch.Tensor:
    return _all_narrow(x, weight, cast(x.square()).mean(-1, keepdim=True), eps, cast)


def _all_narrow(
    x: torch.Tensor, weight: torch.Tensor, variance: torch.Tensor, eps: float, cast: Format
) -> torch.Tensor:
    return cast(cast(weight) * cast(x * cast(cast(cast(variance) + eps).rsqrt())))


def _by_this_machine(x: torch.Tensor, weight: torch.Tensor, eps: float, cast: Format) -> torch.Tensor:
    """In the format's own arithmetic: libraries round its reciprocal roots in ways of their own."""
    x, weight = _held(x, cast), _held(weight, cast)
    return (weight * (x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt())).to(torch.float64)


def _summed_by_this_machine(x: torch.Tensor, weight: torch.Tensor, eps: float, cast: Format) -> torch.Tensor:
    variance = _held(_summed(x, cast), cast)
    x, weight = _held(x, cast), _held(weight, cast)
    return (weight * (x * (variance + eps).rsqrt())).to(torch.float64)


def _held(values: torch.Tensor, cast: Format) -> torch.Tensor:
    return held_in(values, next(dtype for dtype, form in OF_DTYPE.items() if form is cast))


def _summed_narrow(x: torch.Tensor, weight: torch.Tensor, eps: float, cast: Format) -> torch.Tensor:
    return _all_narrow(x, weight, _summed(x, cast), eps, cast)


def _summed(x: torch.Tensor, cast: Format) -> torch.Tensor:
    """The mean of the squares, added up one by one in the format."""
    squares = cast(x.square())
    total = torch.zeros_like(squares[..., 0])
    for column in squares.unbind(-1):
        total = cast(total + column)
    return total[..., None] / x.shape[-1]


def _sum_alone(x: torch.Tensor, weight: torch.Tensor, eps: float, cast: Format) -> torch.Tensor:
    """Only the variance is narrow; what it divides is not."""
    return weight * x * (_summed(x, cast) + eps).rsqrt()


ORDERS: tuple[tuple[str, Normalise], ...] = (
    ("is rounded to {format} after the weight and not before it: cast, then multiply by the weight", _cast_last),
    ("is rounded to {format} before it is multiplied by its weight: multiply first, then cast", _cast_first),
    ("squares and averages in {format}: compute the variance in float32", _squared_narrow),
    ("squares and averages in {format}: compute the variance in float32", _by_this_machine),
    ("accumulates its sum of squares in {format}: accumulate in float32", _summed_narrow),
    ("accumulates its sum of squares in {format}: accumulate in float32", _summed_by_this_machine),
    ("accumulates its sum of squares in {format}: accumulate in float32", _sum_alone),
)


def _in_order(path: str, zero_centred: bool, normalise: Normalise, cast: Format) -> Change:
    def change(module: nn.Module) -> None:
        norm = module.get_submodule(path)
        eps = float(getattr(norm, eps_name(norm) or ""))
        weight = norm.get_parameter("weight") + (1.0 if zero_centred else 0.0)

        def forward(self: nn.Module, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return normalise(hidden_states if normalise is _sum_alone else cast(hidden_states), weight, eps, cast)

        rebind_forward(norm, forward)

    return change


def _trials(drift: Drift) -> Iterator[Trial]:
    if drift.lane != "native":
        return  # In float64 nothing rounds, and every order of casts is the same.
    formats = {form.name: form for form in (OF_DTYPE.get(drift.dtype), *HALVES) if form is not None}
    for path, norm in norms(drift.source_module, drift.forced):
        if takes_gate(norm):
            continue
        zero_centred = is_zero_centred(norm)
        for form in formats.values():
            for words, normalise in ORDERS:
                says = f"{path or 'The norm'} {words.format(format=form.name)}"
                change = _in_order(path, zero_centred, normalise, form)
                yield Trial("norm-cast-order", says, change, part=path, resolves=form.resolves)


HYPOTHESIS = TrialHypothesis(("norm-cast-order",), _trials)
