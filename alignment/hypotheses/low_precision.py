"""Values that carry fewer bits than they should: parameters rounded or quantized, outputs rounded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from porter.alignment.drift import Drift, Parameter
from porter.alignment.hypotheses.relation import Finding, ParameterHypothesis, relative
from porter.alignment.hypotheses.trial import Outcome, Trial, cause
from porter.alignment.report import Cause

MOST_BITS = 16
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


def nearest_levels(source: torch.Tensor, candidate: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`source` [R, C] rounded per row to the values that `candidate` [R, C] takes there, and the most it takes."""
    levels = candidate.sort(dim=-1)[0].contiguous()
    distinct = int((levels.diff(dim=-1) != 0).sum(-1).max()) + 1
    right = torch.searchsorted(levels, source.contiguous()).clamp(1, levels.shape[-1] - 1)
    low, high = levels.gather(-1, right - 1), levels.gather(-1, right)
    return torch.where((source - low).abs() <= (high - source).abs(), low, high), distinct


def _bits(drift: Drift, parameter: Parameter) -> Iterator[Finding]:
    source, candidate = parameter.source.to(torch.float64), parameter.candidate.to(torch.float64)
    bits = significant_bits(candidate)
    if bits <= MOST_BITS and bits < significant_bits(source):
        known = f", as {FORMATS[bits]}" if bits in FORMATS else ""
        for towards_zero, how in ((False, "rounded"), (True, "truncated")):
            says = f"{parameter.name} is {how} to {bits} significant bits{known}: keep it in the source's precision"
            yield Finding("low-precision", relative(round_to(source, bits, towards_zero), candidate), says)
    yield from _levels(parameter.name, source, candidate)


def _levels(name: str, source: torch.Tensor, candidate: torch.Tensor) -> Iterator[Finding]:
    views = [("in all", source.reshape(1, -1), candidate.reshape(1, -1))]
    if source.dim() > 1:
        views.append(("per row", source.flatten(0, -2), candidate.flatten(0, -2)))
    for words, rows, others in views:
        if rows.shape[-1] < 8:
            continue
        rounded, distinct = nearest_levels(rows, others)
        if distinct <= min(rows.shape[-1] // 4, 2**12):
            bits = math.ceil(math.log2(max(distinct, 2)))
            says = f"{name} takes only {distinct} values {words}: it was quantized to {bits} bits; keep its precision"
            yield Finding("low-precision", relative(rounded, others), says)


@dataclass(frozen=True)
class OutputPrecision:
    """An output that carries fewer bits than its dtype holds: stored narrower somewhere on its way."""

    kinds: tuple[str, ...] = ("low-precision",)

    def applies(self, drift: Drift) -> bool:
        """Whether the candidate ran in its own precision: in float64 no bits are lost."""
        return drift.candidate.is_floating_point() and drift.candidate.numel() > 8

    def explain(self, drift: Drift) -> Cause | None:
        """The number of bits, when rounding the oracle to them gives the candidate."""
        bits = significant_bits(drift.candidate)
        if bits > MOST_BITS or bits >= significant_bits(drift.oracle.to(drift.candidate_dtype)):
            return None
        known = f", as {FORMATS[bits]}" if bits in FORMATS else ""
        after = relative(drift.candidate, round_to(drift.oracle, bits))
        says = f"The output carries only {bits} significant bits{known}: something on its way stores it narrower"
        return cause(drift, Outcome(Trial("low-precision", says), after))


PARAMETER = ParameterHypothesis(("low-precision",), _bits)
OUTPUT = OutputPrecision()
