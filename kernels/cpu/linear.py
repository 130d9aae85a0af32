"""Linear layers on the CPU: our kernel or torch's, whichever was measured to be faster for the shape."""

from __future__ import annotations

from collections.abc import Callable

import torch

from porter.kernels.cpu.layout import (
    EMPTY,
    FLOAT32_OVER_BFLOAT16,
    FLOAT_CODES,
    NOT_CONTIGUOUS,
    NOT_CPU,
    NOT_FLOAT,
    OTHER_DTYPE,
    OTHER_SHAPE,
    rows_of,
    threads_for,
)
from porter.kernels.cpu.library import DTYPE_CODES, KernelLibrary

Linear = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]
Int8Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]

FEW_ROWS = 8
"""Up to this many rows of activations, weights are streamed once from memory without packing."""

TORCH_FROM_ROWS = {
    ("avx512", torch.float32): 9,
    ("avx512", torch.bfloat16): 5,
    ("avx2", torch.float32): 9,
    ("avx2", torch.bfloat16): None,
}
"""Rows of activations from which torch's own product is the faster one; None: never. The avx512
rows are measured with benchmarks/kernel_times.py on one loaded Zen 4 core. The avx2 rows are not measured side by
side: they follow avx512's float32, and the slow bfloat16 product that torch showed on a processor with AVX2 alone."""

INT8_CODE = DTYPE_CODES[torch.int8]
EXACT_K = 132104  # k * 127 * 128 < 2^31

UNALIGNED = "weight rows are not contiguous"


def linear(library: KernelLibrary) -> Linear:
    """x weight^T + bias in float32 or bfloat16, or in float32 over a bfloat16 weight."""

    def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        dtype = x.dtype
        if rows > 4 and weight.dtype is dtype:
            limit = TORCH_FROM_ROWS.get((library.isa or "", dtype), 1)
            if limit is not None and rows >= limit:
                return torch.nn.functional.linear(x, weight, bias)
        x, stride = rows_of(x)
        n, k = weight.shape
        out = torch.empty((*x.shape[:-1], n), dtype=dtype)
        library.linear(
            out.data_ptr(), x.data_ptr(), weight.data_ptr(), None, None if bias is None else bias.data_ptr(), rows, n,
            k, stride, weight.stride(0), FEW_ROWS, FLOAT_CODES[dtype], FLOAT_CODES[weight.dtype],
            threads_for(2 * n * k),
        )
        return out

    return call


def linear_w8a16(library: KernelLibrary) -> Int8Linear:
    """x (weight * weight_scale)^T + bias with int8 weights, floating-point maths."""
    return _int8(library, "linear", INT8_CODE)


def linear_w8a8(library: KernelLibrary) -> Int8Linear:
    """The same with x quantized per token and exact integer sums."""
    return _int8(library, "linear_w8a8")


def _int8(library: KernelLibrary, kernel: str, *weight_code: int) -> Int8Linear:
    """`kernel` is looked up at each call: a recording puts another function in its place."""

    def call(
        x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        x, stride = rows_of(x)
        n, k = weight.shape
        out = torch.empty((*x.shape[:-1], n), dtype=x.dtype)
        getattr(library, kernel)(
            out.data_ptr(), x.data_ptr(), weight.data_ptr(), weight_scale.data_ptr(),
            None if bias is None else bias.data_ptr(), x.numel() // k, n, k, stride, weight.stride(0), FEW_ROWS,
            FLOAT_CODES[x.dtype], *weight_code, threads_for(n * k),
        )
        return out

    return call


def accepts_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    """CPU tensors of one dtype, float32 or bfloat16, or a bfloat16 weight under float32; the weight's rows contiguous.
    """
    if not (x.is_cpu and weight.is_cpu):
        return NOT_CPU
    dtype = x.dtype
    if dtype not in FLOAT_CODES:
        return NOT_FLOAT
    if weight.dtype is not dtype and (dtype, weight.dtype) != FLOAT32_OVER_BFLOAT16:
        return OTHER_DTYPE
    return _accepts_rest(x, weight, bias)


def accepts_int8(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> str | None:
    """float32 or bfloat16 activations, int8 weight, float32 scales."""
    if not (x.is_cpu and weight.is_cpu and weight_scale.is_cpu):
        return NOT_CPU
    if x.dtype not in FLOAT_CODES:
        return NOT_FLOAT
    if weight.dtype is not torch.int8 or weight_scale.dtype is not torch.float32:
        return "the weight is not int8 with float32 scales"
    if not weight_scale.is_contiguous():
        return NOT_CONTIGUOUS
    if weight_scale.numel() != weight.shape[0]:
        return OTHER_SHAPE
    return _accepts_rest(x, weight, bias)


def accepts_w8a8(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> str | None:
    """As `accepts_int8`, with K small enough for exact int32 sums."""
    if weight.shape[-1] > EXACT_K:
        return f"K is over {EXACT_K}: int32 sums might overflow"
    return accepts_int8(x, weight, weight_scale, bias)


def _accepts_rest(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    n, k = weight.shape
    if x.shape[-1] != k:
        return OTHER_SHAPE
    if weight.stride(1) != 1:
        return UNALIGNED
    if bias is not None:
        if bias.dtype is not x.dtype or not bias.is_contiguous():
            return "the bias differs in dtype or is not contiguous"
        if bias.numel() != n:
            return OTHER_SHAPE
    return None if x.numel() and weight.numel() else EMPTY
