"""Zero points of an asymmetric quantization left out, applied twice, off by one, or signs read wrongly.

W = (codes - zero) x step becomes W + c x step, c constant on each group: the difference shows the groups.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.relation import Finding, Parameter, ParameterHypothesis, relative

GROUPS = (128, 64, 32, 16, 8)
"""Columns that share a zero point, besides whole rows."""
EVEN = 1e-3
"""Offsets that vary by less than this share of their size are one constant, not zero points."""


def _by_group(values: torch.Tensor, group: int) -> torch.Tensor:
    grouped: torch.Tensor = values.unflatten(-1, (-1, group))
    return grouped


def step_of(candidate: torch.Tensor) -> torch.Tensor:
    """The smallest gap between two values of each group [..., G]: the step of its quantizer, [..., 1]."""
    ordered = candidate.sort(dim=-1)[0]
    gaps = ordered.diff(dim=-1)
    span = (ordered[..., -1:] - ordered[..., :1]).clamp_min(1e-300)
    step: torch.Tensor = torch.where(gaps > 1e-5 * span, gaps, torch.inf).amin(-1, keepdim=True)
    return step


def _relation(drift: Drift, parameter: Parameter) -> Iterator[Finding]:
    source, candidate = parameter.source, parameter.candidate
    if source.dim() < 2:
        return
    columns = source.shape[-1]
    for group in (columns, *(g for g in GROUPS if columns % g == 0 and columns > g)):
        if group < 8:
            continue
        theirs, mine = _by_group(source, group), _by_group(candidate, group)
        unit = "row" if group == columns else f"group of {group} columns"
        yield from _offsets(parameter, theirs, mine, unit)
        yield from _signs(parameter.name, theirs, mine)


def _offsets(parameter: Parameter, source: torch.Tensor, candidate: torch.Tensor, unit: str) -> Iterator[Finding]:
    offset = (candidate - source).mean(-1, keepdim=True)
    if not parameter.quantized and float((offset - offset.mean()).norm()) < EVEN * float(offset.norm()):
        return
    steps = (offset / step_of(candidate)).abs()
    steps = steps[steps.isfinite() & (steps > 0)]
    typical = float(steps.median()) if steps.numel() else 0.0
    one = typical and abs(typical - 1.0) < 0.1 and float((steps - 1.0).abs().max()) < 0.25
    how = "one step off (zero + 1)" if one else "left out, applied twice, or of the other sign"
    says = f"Each {unit} of {parameter.name} is off by a constant of its own: its zero point is {how}"
    yield Finding("zero-point", relative(source + offset, candidate), says)


def _signs(name: str, source: torch.Tensor, candidate: torch.Tensor) -> Iterator[Finding]:
    """Negative codes read as large positive ones, or large codes as negative: two's complement against offset."""
    for words, chosen in (
        ("negative codes are read as unsigned ones", source < 0),
        ("codes of half the range and more are read as negative", source > 0),
    ):
        difference = torch.where(chosen, candidate - source, 0.0)
        moved = difference.abs() > 0.25 * difference.abs().amax(-1, keepdim=True)
        count = moved.sum(-1, keepdim=True).clamp_min(1)
        offset = torch.where(moved, difference, 0.0).sum(-1, keepdim=True) / count
        if not bool(moved.any()):
            continue
        predicted = source + torch.where(moved, offset, 0.0)
        says = f"In {name} {words} (each off by the whole range of the codes): the sign or zero point is read wrongly"
        if bool((moved.sum(-1) > 1).any()):
            yield Finding("zero-point", relative(predicted, candidate), says)


HYPOTHESIS = ParameterHypothesis(("zero-point",), _relation)
