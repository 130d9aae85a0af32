"""Reading quantized weights back, and the error that their scheme must cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from porter.kernels.reference.experts_w4a8 import make_scale_bias, unpack_int4, unpack_scale
from porter.kernels.reference.linear_static import offset_correction

# Half a step of a uniform quantizer errs like a uniform variable: step / sqrt(12) in the mean. Methods that place the
# steps otherwise than round-to-nearest may lose more; twice the mean still leaves one bit of precision detectable.
QUANTIZATION_SLACK = 2.0
INT8_LEVELS = 127.0
INT4_LEVELS = 7.0
WHOLE_ROW = 1 << 62
"""Columns of a grid whose steps are one per row."""


@dataclass(frozen=True)
class Dequantized:
    """`values` of a stored weight, None with the reason in `why` where they cannot be read; `step` of the quantizer in
    a shape that broadcasts to theirs, and the `grid` (rows, columns) that shares one, of `levels` steps on either side
    of zero. `wrong`: the tensors contradict each other."""

    values: Tensor | None
    step: Tensor | None = None
    grid: tuple[int, int] | None = None
    levels: float = INT8_LEVELS
    why: str = ""
    wrong: bool = False


def dequantized(tensor: Tensor, scale: Tensor | None) -> Dequantized:
    """The values of `tensor`, stored with `scale`.

    Floats without a scale are as they are. Codes (int8, float8) times one scale per output row [..., N], or one per
    block of a weight [..., N, K]: scale [..., ceil(N / b), ceil(K / b)], or [..., N, ceil(K / b)] for groups of a row.
    An int64 scale [..., G, N] is that of packed int4 codes (the Op experts/w4a8), which come back as [..., N, K].
    """
    if scale is not None and scale.dtype == torch.int64:
        return _from_int4(tensor, scale)
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


def _from_int4(packed: Tensor, scale: Tensor) -> Dequantized:
    """packed [..., K, N / 2] with scale [..., G, N] -> [..., N, K]."""
    inputs, groups = packed.shape[-2], scale.shape[-2]
    if 2 * packed.shape[-1] != scale.shape[-1] or inputs % groups:
        why = f"a scale of shape {tuple(scale.shape)} does not fit int4 codes packed as {tuple(packed.shape)}"
        return Dequantized(None, why=why)
    step = unpack_scale(scale).transpose(-1, -2).repeat_interleave(inputs // groups, dim=-1)
    grid = (1, WHOLE_ROW if groups == 1 else inputs // groups)
    return Dequantized(unpack_int4(packed).to(torch.float32) * step, step, grid, INT4_LEVELS)


def contradiction(codes: Tensor, scale: Tensor | None, beside: Mapping[str, Tensor]) -> str:
    """How what lies `beside` quantized codes, by the ends of their names, contradicts them; "" where it does not.

    quant_bias takes away what the offset of the input adds, scale_bias what the chip's shift of nibbles does: neither
    is a weight of the source, and a wrong one is a constant in every output.
    """
    if "quant_bias" in beside:
        offset = beside["input_offset"]
        if not torch.equal(beside["quant_bias"], offset_correction(codes, offset)):
            return f"quant_bias is not -input_offset ({int(offset)}) times the sums of the rows: compute it anew"
    if "scale_bias" in beside and scale is not None and scale.dtype == torch.int64:
        wanted = make_scale_bias(unpack_int4(codes), unpack_scale(scale))
        # Sums of K terms in whatever order: a millionth of their size is rounding.
        if not bool(((beside["scale_bias"] - wanted).abs() <= 1e-5 * wanted.abs().amax().clamp_min(1e-30)).all()):
            return "scale_bias is not 8 times the sums of int4 weight times scale: compute it anew"
    return ""


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


def quantization_error(
    reference: Tensor, grid: tuple[int, int], codes: torch.dtype, levels: float = INT8_LEVELS
) -> float:
    """Expected relative L2 error of round-to-nearest with the best symmetric scale of every block, and its slack.

    Integers: a step of absmax / `levels`, errors uniform within half of it. float8: measured, by rounding.
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
            squared += _squared_error(block, largest, grid[0], wide, codes, levels)
            total += float(block.to(torch.float64).square().sum())
    return QUANTIZATION_SLACK * math.sqrt(squared / total) if total else 0.0


def _largest(block: Tensor, high: int, wide: int) -> Tensor:
    rows, columns = block.shape
    padded = torch.nn.functional.pad(block.abs(), (0, -columns % wide, 0, -rows % high))
    return padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide).amax(dim=(1, 3))


def _squared_error(block: Tensor, largest: Tensor, high: int, wide: int, codes: torch.dtype, levels: float) -> float:
    spread = largest.repeat_interleave(high, 0)[: block.shape[0]].repeat_interleave(wide, 1)[:, : block.shape[1]]
    if codes == torch.int8:
        return float((spread.to(torch.float64) / levels).square().sum() / 12.0)
    scale = (spread / torch.finfo(codes).max).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((block / scale).to(codes).to(torch.float32) * scale - block).to(torch.float64).square().sum())
