"""Reading quantized weights back, and the error that their scheme must cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Half a step of a uniform quantizer errs like a uniform variable: step / sqrt(12) in the mean. Methods that place the
# steps otherwise than round-to-nearest may lose more; twice the mean still leaves one bit of precision detectable.
QUANTIZATION_SLACK = 2.0
INT8_LEVELS = 127.0
WHOLE_ROW = 1 << 62
"""Columns of a grid whose steps are one per row."""


@dataclass(frozen=True)
class Dequantized:
    """`values` of a stored weight, None with the reason in `why` where they cannot be read; `step` of the quantizer in
    a shape that broadcasts to theirs, and the `grid` (rows, columns) that shares one. `wrong`: the tensors contradict
    each other."""

    values: Tensor | None
    step: Tensor | None = None
    grid: tuple[int, int] | None = None
    why: str = ""
    wrong: bool = False


def dequantized(tensor: Tensor, scale: Tensor | None) -> Dequantized:
    """The values of `tensor`, stored with `scale`.

    Floats without a scale are as they are. Codes (int8, float8) times one scale per output row [..., N], or one per
    block of a weight [..., N, K]: scale [..., ceil(N / b), ceil(K / b)], or [..., N, ceil(K / b)] for groups of a row.
    """
    coded = tensor.is_floating_point() and tensor.element_size() == 1
    if scale is None:
        return Dequantized(None, why=f"{tensor.dtype} without a scale") if coded else Dequantized(tensor)
    if tensor.dtype != torch.int8 and not coded:
        return Dequantized(None, why=f"{tensor.dtype} with a scale of shape {tuple(scale.shape)}")
    grid = grid_of(tensor, scale)
    if grid is None:
        turned = scale.dim() > 1 and grid_of(tensor, scale.transpose(-2, -1)) is not None
        why = f"a scale of shape {tuple(scale.shape)} does not tile {tuple(tensor.shape)}"
        return Dequantized(None, why=why + "; transposed it would" * turned, wrong=turned)
    step = _spread(scale.to(torch.float32), tensor, grid)
    return Dequantized(tensor.to(torch.float32) * step, step, grid)


def grid_of(tensor: Tensor, scale: Tensor) -> tuple[int, int] | None:
    """The rows and columns of `tensor` [..., N, K] that share one element of `scale`; None where it does not fit.

    Blocks are square or lie within one row. Sides are taken as powers of two where that fits.
    """
    if scale.dim() and scale.shape == tensor.shape[: scale.dim()] and scale.dim() == tensor.dim() - 1:
        return 1, WHOLE_ROW
    if scale.dim() != tensor.dim() or tensor.dim() < 2 or scale.shape[:-2] != tensor.shape[:-2]:
        return None
    rows, columns = (_sides(int(n), int(count)) for n, count in zip(tensor.shape[-2:], scale.shape[-2:], strict=True))
    if scale.shape[-2] == tensor.shape[-2] and columns:
        return 1, max(columns)
    common = rows & columns
    return (max(common), max(common)) if common else None


def _sides(length: int, count: int) -> set[int]:
    """The block sides that cut `length` into `count` pieces: powers of two, and the even cut."""
    if not 0 < count <= length:
        return set()
    powers = {1 << p for p in range(16) if math.ceil(length / (1 << p)) == count}
    even = math.ceil(length / count)
    return powers | ({even} if math.ceil(length / even) == count else set())


def _spread(scale: Tensor, tensor: Tensor, grid: tuple[int, int]) -> Tensor:
    """`scale` in a shape that broadcasts to `tensor`'s."""
    if grid == (1, WHOLE_ROW):
        return scale[..., None]
    rows, columns = tensor.shape[-2:]
    return scale.repeat_interleave(grid[0], -2)[..., :rows, :].repeat_interleave(grid[1], -1)[..., :columns]


def quantization_error(reference: Tensor, grid: tuple[int, int], codes: torch.dtype) -> float:
    """Expected relative L2 error of round-to-nearest with the best symmetric scale of every block, and its slack.

    int8: a step of absmax / 127, errors uniform within half of it. float8: measured, by rounding.
    """
    squared = total = 0.0
    rows, columns = reference.shape[-2:] if reference.dim() > 1 else (1, reference.shape[-1])
    wide = grid[1] if grid[1] < columns else columns
    matrices = reference.detach().reshape(-1, rows, columns)
    run = max(1, (1 << 20) // max(1, columns) // grid[0]) * grid[0]
    for matrix in matrices:
        for start in range(0, rows, run):
            block = matrix[start : start + run].to(torch.float32)
            largest = _largest(block, grid[0], wide)
            squared += _squared_error(block, largest, grid[0], wide, codes)
            total += float(block.to(torch.float64).square().sum())
    return QUANTIZATION_SLACK * math.sqrt(squared / total) if total else 0.0


def _largest(block: Tensor, high: int, wide: int) -> Tensor:
    rows, columns = block.shape
    padded = torch.nn.functional.pad(block.abs(), (0, -columns % wide, 0, -rows % high))
    return padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide).amax(dim=(1, 3))


def _squared_error(block: Tensor, largest: Tensor, high: int, wide: int, codes: torch.dtype) -> float:
    spread = largest.repeat_interleave(high, 0)[: block.shape[0]].repeat_interleave(wide, 1)[:, : block.shape[1]]
    if codes == torch.int8:
        return float((spread.to(torch.float64) / INT8_LEVELS).square().sum() / 12.0)
    scale = (spread / torch.finfo(codes).max).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((block / scale).to(codes).to(torch.float32) * scale - block).to(torch.float64).square().sum())
