"""Quantization that costs more than its scheme: fewer levels, a clipped range, one scale where there should be many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from porter.alignment.drift import Drift, Inputs
from porter.alignment.hypotheses.anatomy import experts
from porter.alignment.hypotheses.low_precision import grid_levels, levels_around, nearest_levels
from porter.alignment.hypotheses.relation import Finding, Parameter, ParameterHypothesis, relative
from porter.alignment.hypotheses.rounding import E4M3, Format
from porter.alignment.hypotheses.trial import Trial, TrialHypothesis

SCHEME_LEVELS = 255
"""Of the int8 scheme."""


def _levels(drift: Drift, parameter: Parameter) -> Iterator[Finding]:
    """The candidate's values are the source's, rounded to a grid of its own that is too coarse or too short."""
    if not parameter.quantized:
        return
    source, candidate = (tensor.flatten(0, -2) for tensor in (parameter.source, parameter.candidate))
    # Codes that were rounded twice saw a value rounded to the scheme's own step before.
    step = source.abs().amax(-1, keepdim=True) / (SCHEME_LEVELS // 2)
    nearest = nearest_levels(source, candidate, step)
    clipped = float((source.abs().amax(-1) > 1.01 * candidate.abs().amax(-1)).double().mean())
    levels = grid_levels(candidate)
    if clipped > 0.5:
        how = f"clips the largest values of {100 * clipped:.0f} % of its rows: its scales are too small"
    elif levels is not None and levels < SCHEME_LEVELS // 2:
        how = f"uses {levels} of its {SCHEME_LEVELS} levels: its scales are too large, or it was quantized twice"
    else:
        how = "costs more than one rounding to its scheme"
    says = f"{parameter.name} {how}; quantize it again from the source, scale = largest magnitude / 127 per row"
    yield Finding("quantization-excess", relative(nearest, candidate), says)
    low, high = levels_around(source, candidate)
    says = f"{parameter.name}'s codes are cut towards zero: round to nearest"
    yield Finding("quantization-excess", relative(torch.where(source > 0, low, high), candidate), says)


def integers(tensor: torch.Tensor, dims: tuple[int, ...], levels: float = 127.0) -> torch.Tensor:
    """`tensor` rounded to +-`levels` levels of the largest magnitude over `dims`."""
    step = tensor.abs().amax(dim=dims, keepdim=True).clamp_min(1e-300) / levels
    return (tensor / step).round() * step


def _every(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(range(tensor.dim()))


def _scaled_float(tensor: torch.Tensor, dims: tuple[int, ...], form: Format) -> torch.Tensor:
    step = tensor.abs().amax(dim=dims, keepdim=True).clamp_min(1e-300) / form.largest
    return form(tensor / step) * step


ACTIVATIONS: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("int8 with one scale for all tokens: take one per token", lambda x: integers(x, _every(x))),
    ("int8, one scale per token: the source does not quantize them", lambda x: integers(x, (-1,))),
    ("int8, one scale per channel", lambda x: integers(x, tuple(range(x.dim() - 1)))),
    ("int4, one scale per token", lambda x: integers(x, (-1,), 7.0)),
    ("float8 e4m3 with one scale for all tokens", lambda x: _scaled_float(x, _every(x), E4M3)),
    ("float8 e4m3, one scale per token", lambda x: _scaled_float(x, (-1,), E4M3)),
    ("float8 e4m3 without a scale", E4M3),
)


def _first_changed(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[tuple[Any, ...], dict[str, Any]], Inputs]:
    def inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
        return args, {**kwargs, name: change(kwargs[name])}

    return inputs


def _activation_trials(drift: Drift) -> Iterator[Trial]:
    weight = drift.source_module._parameters.get("weight")
    linear = weight is not None and weight.dim() == 2 and not isinstance(drift.source_module, nn.Embedding)
    if drift.lane == "native" and (linear or any(path == "" for path, _ in experts(drift.source_module, drift.forced))):
        for words, change in ACTIVATIONS:
            says = f"The inputs are quantized to {words}"
            yield Trial("quantization-excess", says, inputs=_first_changed(change))


PARAMETER = ParameterHypothesis(("quantization-excess",), _levels)
ACTIVATION = TrialHypothesis(("quantization-excess",), _activation_trials)
