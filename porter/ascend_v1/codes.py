"""The numbers of AscendV1: codes, scales as the loader will hold them, packing, and what is derived from both."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from porter.ascend_v1.quant_type import SLICES
from porter.errors import PorterError
from porter.quantization import BLOCK_ELEMENTS, INT4_MAX, INT8_MAX, SMALLEST_SCALE

CLIPS = (1.0, 0.9, 0.82, 0.74, 0.66, 0.58, 0.5)
"""Fractions of a row's largest weight that int4 codes may end at. Normal weights are coded best at about 2.7 standard
deviations, of a largest of about 4 in rows of some thousands; the best of these costs each row seven tries."""

Rows = Callable[[int, int], Tensor]
"""(start, stop) -> rows [start, stop) of a weight in float32."""


def rows_of(weight: Tensor) -> Rows:
    """The rows of a floating-point tensor [N, K]."""
    return lambda start, stop: weight[start:stop].to(torch.float32)


def round_up(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 `scale` > 0 -> the least values of `dtype` that are no smaller, in float32.

    vllm-ascend loads scales into parameters of the model's dtype; codes made for the scale that it will hold are right
    for it, and being rounded up, none of them overflows.
    """
    if dtype == torch.float32:
        return scale
    near = scale.to(dtype)
    above = (near.view(torch.int16) + 1).view(dtype)
    result = torch.where(near.to(torch.float32) < scale, above, near).to(torch.float32)
    if not bool(result.isfinite().all()):
        raise PorterError(f"a scale overflows {str(dtype).removeprefix('torch.')}; choose --dtype bf16")
    return result


def int8_codes(rows: Rows, shape: tuple[int, int], scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weight [N, K] -> (codes int8 [N, K], scale float32 [N, 1]): scale is absmax / 127 rounded up to `scale_dtype`."""
    codes, scale = torch.empty(shape, dtype=torch.int8), torch.ones(shape[0], 1)
    for block in _blocks(shape):
        wide = rows(block.start, block.stop)
        step = wide.abs().amax(dim=1, keepdim=True) / INT8_MAX
        _check_finite(step)
        smallest = 2.0**-24 if scale_dtype == torch.float16 else SMALLEST_SCALE
        scale[block] = torch.where(step == 0, 1.0, round_up(step.clamp(min=smallest), scale_dtype))
        codes[block] = (wide / scale[block]).round_()
    return codes, scale


def int4_codes(rows: Rows, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Weight [N, K] -> (codes int8 [N, K] in [-8, 7], scale float32 [N, 1]), each row clipped where its squared error
    is least among `CLIPS`."""
    codes, scale = torch.empty(shape, dtype=torch.int8), torch.ones(shape[0], 1)
    for block in _blocks(shape):
        wide = rows(block.start, block.stop)
        largest = wide.abs().amax(dim=1, keepdim=True)
        _check_finite(largest)
        largest = torch.where(largest == 0, float(INT4_MAX), largest.clamp(min=1e-35))
        best = torch.full_like(largest, torch.inf)
        for clip in CLIPS:
            step = largest * (clip / INT4_MAX)
            tried = (wide / step).round_().clamp_(-INT4_MAX - 1, INT4_MAX)
            error = (tried * step - wide).square_().sum(dim=1, keepdim=True)
            better = error < best
            best = torch.where(better, error, best)
            scale[block] = torch.where(better, step, scale[block])
            codes[block] = torch.where(better, tried.to(torch.int8), codes[block])
    return codes, scale


def _blocks(shape: tuple[int, int]) -> list[slice]:
    step = max(1, BLOCK_ELEMENTS // max(shape[1], 1))
    return [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def _check_finite(values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise PorterError("the weight holds NaN or infinity, which no code stands for; repair the checkpoint")


def pack_rows(codes: Tensor) -> Tensor:
    """int4 codes [N, K] -> int8 [N/2, K]: row 2i in the low nibbles, row 2i + 1 in the high ones.

    As msmodelslim's `w4a8_pack_int4`, which pairs neighbours of the transpose; vllm-ascend transposes back on loading,
    so that neighbouring outputs share a byte.
    """
    even, odd = codes[0::2].to(torch.int16), codes[1::2].to(torch.int16)
    # To int8 by its bits: the byte is 0..255 here.
    return ((odd & 15) * 16 + (even & 15)).to(torch.uint8).view(torch.int8)


def unpack_rows(packed: Tensor) -> Tensor:
    """The inverse of `pack_rows`: int8 [N/2, K] -> codes int8 [N, K]."""
    byte = packed.to(torch.int16)
    low, high = ((byte & 15) ^ 8) - 8, byte >> 4
    return torch.stack((low, high), dim=1).reshape(-1, packed.shape[-1]).to(torch.int8)


def scale_bias(codes: Tensor, scale: Tensor, splits_inputs: bool) -> Tensor:
    """float32 [N, 16] (1 unless `splits_inputs`): 8 * sum over each slice of the columns of code * scale.

    The chip multiplies an int8 input as two int4, of which it takes the lower one 8 too low; this, added, makes up for
    it (msmodelslim `process_scale`). Sums of codes are exact.
    """
    slices = SLICES if splits_inputs else 1
    sums = codes.reshape(codes.shape[0], slices, -1).sum(dim=-1, dtype=torch.int64)
    return (8.0 * sums.to(torch.float64) * scale.to(torch.float64)).to(torch.float32)


def quant_bias(codes: Tensor, deq_scale: Tensor, input_offset: int, bias: Tensor | None) -> Tensor:
    """int32 [N]: bias / deq_scale - sum_k(codes) * input_offset, rounded half to even.

    The chip computes (q_x @ codes + quant_bias) * deq_scale with q_x = x / input_scale + input_offset (AscendV1Saver.
    on_w8a8_static). Computed in float64, in which all but the quotient is exact.
    """
    sums = codes.sum(dim=1, dtype=torch.int64).to(torch.float64)
    added = 0.0 if bias is None else bias.to(torch.float64) / deq_scale.to(torch.float64)
    exact = torch.round(added - sums * input_offset)
    if bool((exact.abs() > torch.iinfo(torch.int32).max).any()) or not bool(exact.isfinite().all()):
        raise PorterError("its bias divided by input_scale * weight_scale leaves int32; use a dynamic scheme for it")
    return exact.to(torch.int32)


def deq_bits(deq_scale: Tensor) -> Tensor:
    """float32 -> int64 that holds its bits, as models in float16 store it (msmodelslim `deqscale2int64`)."""
    return deq_scale.to(torch.float32).view(torch.int32).to(torch.int64)


def deq_value(stored: Tensor) -> Tensor:
    """The float32 deq_scale of what is stored: float32, or int64 of its bits."""
    if stored.dtype != torch.int64:
        return stored.to(torch.float32)
    return (((stored & 0xFFFFFFFF) ^ 2**31) - 2**31).to(torch.int32).view(torch.float32)
