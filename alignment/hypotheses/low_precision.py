"""Values that carry fewer bits than they should: parameters rounded or quantized, outputs rounded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.relation import Finding, Parameter, ParameterHypothesis, relative
from porter.alignment.hypotheses.trial import Outcome, Trial, cause, joined, mapped
from porter.alignment.report import Cause

MOST_BITS = 16
ON_GRID, LOOSEST = 0.02, 0.2
"""How far from a grid, in steps, a value may lie that is on it; and the farthest that still says something."""
MOST_LEVELS = 256
HALFWAY = 1e-3
MOST_ROWS = 0.9
"""Share of the rows that must lie on a grid: rows of zeros and outliers may not."""
FORMATS = {11: "float16 or tf32", 8: "bfloat16", 4: "float8 e4m3", 3: "float8 e5m2", 2: "float4 e2m1"}


def significant_bits(values: torch.Tensor) -> int:
    """The fewest significant bits that hold every value exactly, the leading one counted; at most 53."""
    mantissa = torch.frexp(values.to(torch.float64).flatten())[0]
    mantissa = mantissa[torch.isfinite(mantissa)]
    for bits in range(1, 53):
        scaled = mantissa * 2.0**bits
        if bool((scaled == scaled.round()).all()):
            return bits
    return 53


def round_to(values: torch.Tensor, bits: int, towards_zero: bool = False) -> torch.Tensor:
    """Round to `bits` significant bits, to nearest even or towards zero; float64."""
    mantissa, exponent = torch.frexp(values.to(torch.float64))
    scaled = mantissa * 2.0**bits
    return torch.ldexp((scaled.trunc() if towards_zero else scaled.round()) / 2.0**bits, exponent)


def levels_around(source: torch.Tensor, candidate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values that `candidate` [R, C] takes in the same row just below and above each of `source` [R, C]."""
    levels = candidate.sort(dim=-1)[0].contiguous()
    right = torch.searchsorted(levels, source.contiguous()).clamp(1, levels.shape[-1] - 1)
    return levels.gather(-1, right - 1), levels.gather(-1, right)


def nearest_levels(
    source: torch.Tensor, candidate: torch.Tensor, undecided: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """`source` [R, C] rounded per row to the nearest of the values that `candidate` [R, C] takes in that row.

    Halfway between two, to the candidate's own choice; also where the two are that near but for `undecided`, which is
    what whoever rounded may have seen of another value.
    """
    low, high = levels_around(source, candidate)
    nearest = torch.where((source - low).abs() <= (high - source).abs(), low, high)
    as_near = (source - candidate).abs() <= (1 + HALFWAY) * (source - nearest).abs() + undecided
    return torch.where(as_near, candidate, nearest)


def grid_levels(values: torch.Tensor) -> int | None:
    """How many levels the evenly spaced grids span that hold the values [R, C] of each row; None without such grids.

    The step of a row is the smallest gap between two of its values; all gaps must be multiples of it, to 5 %.
    """
    return _even_gaps(values)


def symmetric_levels(values: torch.Tensor, storage: float) -> int | None:
    """How many levels -n to n the grids have that hold the values [R, C] of each row, its largest magnitude being n
    steps: the fewest of a quantizer's. Levels may have been rounded by `storage` when they were stored."""
    largest = values.abs().amax(-1, keepdim=True).clamp_min(1e-300)
    for bits in range(2, 9):
        highest: int = 2 ** (bits - 1) - 1
        steps = values / largest * highest
        slack = ON_GRID + 2.0 * storage * steps.abs()
        if highest > 1 and 2.0 * storage * highest > LOOSEST:
            return None
        on_grid = ((steps - steps.round()).abs() < slack).all(-1)
        if float(on_grid.double().mean()) >= MOST_ROWS:
            return 2 * highest + 1
    return None


def _even_gaps(values: torch.Tensor) -> int | None:
    ordered = values.sort(dim=-1)[0]
    span = (ordered[:, -1:] - ordered[:, :1]).clamp_min(1e-300)
    gaps = ordered.diff(dim=-1)
    gaps = torch.where(gaps > 1e-6 * span, gaps, torch.inf)
    step = gaps.amin(-1, keepdim=True)
    multiples = torch.where(gaps.isinf(), 1.0, gaps / step)
    on_grid = ((multiples - multiples.round()).abs() < 0.05).all(-1)
    steps = (span / step).round().squeeze(-1)
    held = on_grid & (steps < MOST_LEVELS)
    if float(held.double().mean()) < MOST_ROWS:
        return None
    return int(steps[held].max()) + 1


def _bits(drift: Drift, parameter: Parameter) -> Iterator[Finding]:
    source, candidate = parameter.source.to(torch.float64), parameter.candidate.to(torch.float64)
    bits = significant_bits(candidate)
    if not parameter.quantized and bits <= MOST_BITS and bits < significant_bits(source):
        known = f", as {FORMATS[bits]}" if bits in FORMATS else ""
        for towards_zero, how in ((False, "rounded"), (True, "truncated")):
            says = f"{parameter.name} is {how} to {bits} significant bits{known}: keep it in the source's precision"
            yield Finding("low-precision", relative(round_to(source, bits, towards_zero), candidate), says)
    if not parameter.quantized:
        yield from _levels(parameter.name, source, candidate, parameter.storage)


def _levels(name: str, source: torch.Tensor, candidate: torch.Tensor, storage: float) -> Iterator[Finding]:
    views = [("in all", source.reshape(1, -1), candidate.reshape(1, -1))]
    if source.dim() > 1:
        views.append(("per row", source.flatten(0, -2), candidate.flatten(0, -2)))
    for words, rows, others in views:
        if rows.shape[-1] < 8:
            continue
        levels = grid_levels(others) or symmetric_levels(others, storage)
        if levels is not None and levels > 1:
            bits = math.ceil(math.log2(levels))
            says = (
                f"{name} lies on a grid of {levels} levels {words}: it was quantized to {bits} bits; keep its precision"
            )
            # Divided by the step in the stored dtype, a value near halfway goes either way.
            nearest = nearest_levels(rows, others, 4.0 * storage * rows.abs())
            yield Finding("low-precision", relative(nearest, others), says)


@dataclass(frozen=True)
class OutputPrecision:
    """An output that carries fewer bits than its dtype holds: stored narrower somewhere on its way."""

    kinds: tuple[str, ...] = ("low-precision",)

    def applies(self, drift: Drift) -> bool:
        """Whether the candidate ran in its own precision: in float64 no bits are lost."""
        return drift.lane == "native" and any(drift.tensor in seen for seen in drift.source_output)

    def explain(self, drift: Drift) -> Cause | None:
        """The number of bits, when rounding the oracle to them gives the candidate."""
        bits = significant_bits(joined(drift, drift.candidate_output))
        if bits > MOST_BITS:
            return None
        known = f", as {FORMATS[bits]}" if bits in FORMATS else ""
        after = mapped(drift, lambda tensor: round_to(tensor, bits))
        says = f"The output carries only {bits} significant bits{known}: something on its way stores it narrower"
        once = cause(drift, Outcome(Trial("low-precision", says), after))
        if (once is not None and once.confidence >= ALONE) or not _fewer(drift, bits):
            return once
        # Rounded more than once, or sums on their way, or down to a format's finest step: no single rounding of the
        # oracle repeats it, but values in so few bits are no accident where the dtype has more.
        return Cause("low-precision", drift.module, ALONE, drift.before, None, says)


def _fewer(drift: Drift, bits: int) -> bool:
    """Whether many values carry fewer bits than their dtype holds, and err no more than some roundings to them."""
    values = joined(drift, drift.candidate_output)
    holds = 1 - math.log2(torch.finfo(drift.dtype).eps)
    few_roundings = drift.before <= ROUNDINGS * 2.0**-bits
    return 2 <= bits < holds and few_roundings and values.unique().numel() > MANY_VALUES


ROUNDINGS, MANY_VALUES = 32.0, 16
ALONE = 0.7
"""Confidence in bits that are missing, by themselves."""

PARAMETER = ParameterHypothesis(("low-precision",), _bits)
OUTPUT = OutputPrecision()
