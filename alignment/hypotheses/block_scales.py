"""Block scales of a quantized weight read wrongly: transposed, in another block shape, tiled, inverted, left out.

A weight W = codes x S, S constant on blocks, becomes W' = codes x U = W x U / S. S is the largest magnitude in each
block (over the format's largest code, one factor for all), so W alone tells S and each mistake predicts W'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.parameter_scale import factor_of
from porter.alignment.hypotheses.relation import Finding, Parameter, ParameterHypothesis, relative

SHAPES = ((128, 128), (1, 128), (128, 1), (64, 64), (1, 64), (1, 32), (32, 32), (1, 16), (16, 16), (1, 8), (8, 8))
"""Block shapes [rows, columns] in use: fp8 checkpoints 128 x 128, grouped int4 1 x 128 or 1 x 32, nvfp4 1 x 16."""
SAME_SET = 0.05
"""Two sets of scales that differ by less, relative, are one: quantized values tell their scale only so well."""
FEWEST = 2
"""Blocks that a weight must have along a dimension for their arrangement to mean anything."""

Misread = Callable[[torch.Tensor, tuple[int, int], tuple[int, int]], torch.Tensor | None]
"""(scales [r, c], block shape, weight shape) -> the scale of every element as misread; None where it cannot be."""


def block_scales(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of each block of weight [R, C]: [ceil(R / rows), ceil(C / columns)]."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.abs(), (0, -columns % block[1], 0, -rows % block[0]))
    largest: torch.Tensor = padded.unflatten(0, (-1, block[0])).unflatten(-1, (-1, block[1])).amax((1, 3))
    return largest


def expanded(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    """The scale of every element of a weight of `shape`."""
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def _transposed(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    return expanded(scales.t().reshape(scales.shape), block, shape)


def _transposed_view(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor | None:
    if scales.shape[0] == scales.shape[1]:
        return None
    return expanded(scales.reshape(scales.shape[1], scales.shape[0]).t(), block, shape)


def _tiled(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    return scales.repeat(block[0], block[1])[: shape[0], : shape[1]]


def _as_blocks(rows: int, columns: int) -> Misread:
    """Scales looked up at [i // (rows x block), j // (columns x block)] / 2: wider or narrower blocks than they are."""

    def misread(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor | None:
        height, width = block[0] * rows // 2, block[1] * columns // 2
        if not height or not width:
            return None
        i = (torch.arange(shape[0], device=scales.device) // height).clamp_max(scales.shape[0] - 1)
        j = (torch.arange(shape[1], device=scales.device) // width).clamp_max(scales.shape[1] - 1)
        return scales[i[:, None], j[None]]

    return misread


def _regrouped(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor | None:
    """Twice the rows and half the columns of scales, over blocks of half the height and twice the width."""
    if scales.shape[1] % 2 or block[0] % 2:
        return None
    return expanded(scales.reshape(-1, scales.shape[1] // 2), (block[0] // 2, block[1] * 2), shape)


def _ones(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    return torch.ones(shape, dtype=scales.dtype, device=scales.device)


def _reciprocal(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    return expanded(1.0 / scales.clamp_min(1e-300), block, shape)


def _squared(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    return expanded(scales.square(), block, shape)


def _by_row(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    return expanded(scales[:, :1].expand_as(scales), block, shape)


def _first(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    return expanded(scales[:1].expand_as(scales), block, shape)


MISREAD: tuple[tuple[str, str, Misread], ...] = (
    ("scale-transposed", "read transposed: transpose the grid of scales, not its shape", _transposed),
    ("scale-transposed", "read as the view of their transpose: transpose them", _transposed_view),
    ("scale-missing", "left out: multiply the codes by them", _ones),
    ("scale-missing", "divided by and not multiplied by: they are reciprocals of what is expected", _reciprocal),
    ("scale-missing", "multiplied by twice: once is enough", _squared),
    ("scale-block-shape", "tiled over the weight and not repeated within each block", _tiled),
    ("scale-block-shape", "applied to blocks of twice that height and width", _as_blocks(4, 4)),
    ("scale-block-shape", "applied to blocks of twice that height", _as_blocks(4, 2)),
    ("scale-block-shape", "applied to blocks of twice that width", _as_blocks(2, 4)),
    ("scale-block-shape", "applied to blocks of half that height and width", _as_blocks(1, 1)),
    ("scale-block-shape", "applied to blocks of half that height", _as_blocks(1, 2)),
    ("scale-block-shape", "applied to blocks of half that width", _as_blocks(2, 1)),
    ("scale-block-shape", "regrouped into blocks of half the height and twice the width", _regrouped),
    ("scale-block-shape", "applied per row of blocks, the first of each row to all", _by_row),
    ("scale-block-shape", "applied per column of blocks, the first of each column to all", _first),
)


def _misread(drift: Drift, parameter: Parameter) -> Iterator[Finding]:
    for source, candidate in _matrices(parameter):
        shape = (source.shape[0], source.shape[1])
        for block in SHAPES:
            scales = block_scales(source, block)
            if min(scales.shape[d] for d in (0, 1) if block[d] > 1) < FEWEST or _even(scales):
                continue
            per_element = expanded(scales, block, shape).clamp_min(1e-300)
            for kind, words, misread in MISREAD:
                used = misread(scales, block, shape)
                if used is None:
                    continue
                predicted = source * (used / per_element)
                after = relative(factor_of(predicted, candidate) * predicted, candidate)
                says = f"The scales of {parameter.name}'s {block[0]} x {block[1]} blocks are {words}"
                yield Finding(kind, after, says)


def _exchanged(drift: Drift, parameter: Parameter) -> Iterator[Finding]:
    """The scales in use are those of the source in another order: they were not moved along with the codes."""
    for source, candidate in _matrices(parameter):
        shape = (source.shape[0], source.shape[1])
        for block in ((1, shape[1]), *SHAPES):
            scales = block_scales(source, block)
            if scales.numel() < 2 * FEWEST or _even(scales):
                continue
            each = expanded(scales, block, shape).clamp_min(1e-300)
            square = _summed((source / each).square(), block)
            used = _summed(source / each * candidate / each, block) / square.clamp_min(1e-300) * scales
            (ranked, order), wanted = used.flatten().sort(), scales.flatten().sort()[0]
            factor = factor_of(wanted, ranked)
            if not float((ranked - factor * wanted).norm()) < SAME_SET * float(ranked.norm()):
                continue
            unit = "rows" if block[0] == 1 and block[1] == shape[1] else f"{block[0]} x {block[1]} blocks"
            says = (
                f"The scales of {parameter.name}'s {unit} are the right ones in another order: "
                "permute them along with the codes"
            )
            placed = torch.empty_like(wanted).scatter_(0, order, factor * wanted).view_as(scales)
            if relative(placed, factor * scales) < SAME_SET:
                continue  # In their own order: a factor on the whole, if anything.
            predicted = source * expanded(placed, block, shape) / each
            yield Finding("weight-permuted", relative(predicted, candidate), says)
            return


def _summed(values: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Sums over the blocks."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % block[1], 0, -rows % block[0]))
    total: torch.Tensor = padded.unflatten(0, (-1, block[0])).unflatten(-1, (-1, block[1])).sum((1, 3))
    return total


def _matrices(parameter: Parameter) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The parameter [R, C], or the first of a stack of experts whose values differ."""
    source, candidate = parameter.source, parameter.candidate
    if source.dim() == 3:
        differs = (source != candidate).flatten(1).any(-1).nonzero().flatten()
        loaded = [index for index in differs.tolist() if bool(candidate[index].any())]
        if loaded:
            yield source[loaded[0]], candidate[loaded[0]]
    elif source.dim() == 2 and bool(candidate.any()):
        yield source, candidate


def _even(scales: torch.Tensor) -> bool:
    """Whether the scales are all but equal: then no arrangement of them can be told from another."""
    return float((scales - scales.mean()).norm()) < 1e-3 * float(scales.norm())


EXCHANGED = ParameterHypothesis(("weight-permuted",), _exchanged)
MISREAD_SCALES = ParameterHypothesis(("scale-transposed", "scale-block-shape", "scale-missing"), _misread)
