"""Parameters off by a factor or by a constant: of the whole tensor, of each row or column, or of blocks of it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.relation import Finding, Parameter, ParameterHypothesis, relative

BLOCK = 128
ENOUGH = 4
"""Elements that must share a factor for it to say anything."""


NEAR_ONE = 0.7
"""Factors no further from one than a scale that is rounded to a power of two."""


def factor_of(source: torch.Tensor, candidate: torch.Tensor) -> float:
    """The least-squares c of candidate = c * source."""
    square = float((source * source).sum())
    return float((source * candidate).sum()) / square if square > 0 else 0.0


def _ratio(drift: Drift, parameter: Parameter) -> Iterator[Finding]:
    source, candidate = parameter.source, parameter.candidate
    factor = factor_of(source, candidate)
    is_bias = parameter.name.endswith("bias")
    if factor == 0.0 or (is_bias and abs(factor - 2.0) < 1e-3):
        return
    kind = "logit-scale" if parameter.name.endswith("lm_head.weight") else "constant-ratio"
    says = f"{parameter.name} is {factor:.6g} times the source's: divide it by {factor:.6g}, or reload it"
    yield Finding(kind, relative(factor * source, candidate), says)


def _rows(drift: Drift, parameter: Parameter) -> Iterator[Finding]:
    source, candidate = parameter.source, parameter.candidate
    if source.dim() < 2:
        return
    for dim, words in ((-1, "row"), (-2, "column")):
        if source.shape[dim] < ENOUGH:
            continue
        square = (source * source).sum(dim, keepdim=True)
        factors = (source * candidate).sum(dim, keepdim=True) / square.clamp_min(1e-300)
        if bool(((factors == 0) & (square > 0)).any()):
            continue  # Zeros were never loaded: no scale makes them.
        if parameter.quantized and NEAR_ONE < float(factors.min()) and float(factors.max()) < 1.0 / NEAR_ONE:
            says = (
                f"The scale of each {words} of {parameter.name} was rounded after the codes were made (factors "
                f"{float(factors.min()):.4g} to {float(factors.max()):.4g}): round it first, or keep float32"
            )
            yield Finding("quantization-excess", relative(factors * source, candidate), says)
            continue
        spread = f"between {float(factors.min()):.4g} and {float(factors.max()):.4g}"
        says = (
            f"Each {words} of {parameter.name} is off by a factor of its own ({spread}): a per-{words} scale is "
            "missing, applied twice, or belongs to another tensor"
        )
        yield Finding("scale-missing", relative(factors * source, candidate), says)


def _blocks(drift: Drift, parameter: Parameter) -> Iterator[Finding]:
    source, candidate = parameter.source, parameter.candidate
    rows, columns = source.shape[-2:] if source.dim() == 2 else (0, 0)
    if rows < 2 * BLOCK or columns < 2 * BLOCK or rows % BLOCK or columns % BLOCK:
        return
    tiles = source.unflatten(0, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))
    others = candidate.unflatten(0, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))
    factors = (tiles * others).sum((1, 3), keepdim=True) / (tiles * tiles).sum((1, 3), keepdim=True).clamp_min(1e-300)
    after = relative((factors * tiles).reshape(source.shape), candidate)
    says = f"Each {BLOCK} x {BLOCK} block of {parameter.name} is off by a factor of its own: its scales are misplaced"
    yield Finding("scale-missing", after, says)


def _offset(drift: Drift, parameter: Parameter) -> Iterator[Finding]:
    source, candidate = parameter.source, parameter.candidate
    offset = float((candidate - source).mean())
    if not math.isfinite(offset) or parameter.quantized:
        return  # Codes are off by a zero point, which is one constant where the scales are alike.
    after = relative(source + offset, candidate)
    rounded = round(offset)
    if abs(rounded) == 1 and abs(offset - rounded) < 1e-3 and source.dim() == 1:
        turned = "1 + w was folded into it" if rounded == 1 else "1 was subtracted from it"
        says = (
            f"{parameter.name} is the source's {rounded:+d}: {turned}, or the norm is of the other (zero-centred) kind"
        )
        yield Finding("norm-zero-centred", after, says)
    elif source.numel() > ENOUGH:
        says = f"{parameter.name} is the source's plus {offset:.6g} everywhere: subtract it, or reload the parameter"
        yield Finding("constant-offset", after, says)


RATIO = ParameterHypothesis(("constant-ratio", "logit-scale"), _ratio)
ROWS = ParameterHypothesis(("scale-missing", "quantization-excess"), _rows)
BLOCKS = ParameterHypothesis(("scale-missing",), _blocks)
OFFSET = ParameterHypothesis(("constant-offset", "norm-zero-centred"), _offset)
