"""The routed experts of a mixture on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any

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
)
from porter.kernels.cpu.library import DTYPE_CODES, KernelLibrary
from porter.kernels.cpu.linear import EXACT_K

_pack_shape = Struct("6q").pack
Experts = Callable[..., torch.Tensor]


def experts(library: KernelLibrary) -> Experts:
    """float32 or bfloat16 weights."""

    def call(
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
    ) -> torch.Tensor:
        return _run(library, hidden, top_k_index, top_k_weights, gate_up, None, down, None, False)

    return call


def int8_experts(library: KernelLibrary, quantize_activations: bool) -> Experts:
    """int8 weights; with `quantize_activations` both inputs are quantized per token and the sums are exact."""

    def call(
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        gate_up: torch.Tensor,
        gate_up_scale: torch.Tensor,
        down: torch.Tensor,
        down_scale: torch.Tensor,
    ) -> torch.Tensor:
        return _run(
            library, hidden, top_k_index, top_k_weights, gate_up, gate_up_scale, down, down_scale, quantize_activations
        )

    return call


def clamped_experts(library: KernelLibrary) -> Experts:
    """As `experts`, with the activation clamped."""

    def call(
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        limit: float,
    ) -> torch.Tensor:
        return _run(library, hidden, top_k_index, top_k_weights, gate_up, None, down, None, False, limit)

    return call


def clamped_int8_experts(library: KernelLibrary, quantize_activations: bool) -> Experts:
    """As `int8_experts`, with the activation clamped."""

    def call(
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        gate_up: torch.Tensor,
        gate_up_scale: torch.Tensor,
        down: torch.Tensor,
        down_scale: torch.Tensor,
        limit: float,
    ) -> torch.Tensor:
        routed = hidden, top_k_index, top_k_weights
        return _run(library, *routed, gate_up, gate_up_scale, down, down_scale, quantize_activations, limit)

    return call


def _run(
    library: KernelLibrary,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor | None,
    down: torch.Tensor,
    down_scale: torch.Tensor | None,
    quantize_activations: bool,
    limit: float | None = None,
) -> torch.Tensor:
    x, stride = rows_of(hidden)
    index, weights = index.contiguous(), weights.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    shape = _pack_shape(*x.shape, down.shape[2], down.shape[0], index.shape[1], stride)
    codes = (
        quantize_activations, FLOAT_CODES[x.dtype], FLOAT_CODES[weights.dtype], DTYPE_CODES[gate_up.dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    tensors = (
        out.data_ptr(), x.data_ptr(), index.data_ptr(), weights.data_ptr(), gate_up.data_ptr(),
        None if gate_up_scale is None else gate_up_scale.data_ptr(), down.data_ptr(),
        None if down_scale is None else down_scale.data_ptr(), shape,
    )  # fmt: skip
    if limit is None:
        library.experts(*tensors, *codes)
    else:
        library.clamped_experts(*tensors, limit, *codes)
    return out


def accepts_experts(
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> str | None:
    """CPU tensors of one dtype, float32 or bfloat16, or bfloat16 experts under float32; the router's weights may be
    either."""
    dtype = gate_up.dtype
    if down.dtype is not dtype or (dtype is not hidden.dtype and (hidden.dtype, dtype) != FLOAT32_OVER_BFLOAT16):
        return OTHER_DTYPE
    return _accepts(hidden, top_k_index, top_k_weights, gate_up, down)


def accepts_clamped_experts(*arguments: Any) -> str | None:
    """As `accepts_experts`, whatever the limit."""
    return accepts_experts(*arguments[:-1])


def accepts_clamped_int8_experts(*arguments: Any) -> str | None:
    """As `accepts_int8_experts`, whatever the limit."""
    return accepts_int8_experts(*arguments[:-1])


def accepts_int8_experts(
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
) -> str | None:
    """float32 or bfloat16 activations, int8 weights with float32 scales."""
    if gate_up.dtype is not torch.int8 or down.dtype is not torch.int8:
        return "the weights are not int8"
    for scale, weight in ((gate_up_scale, gate_up), (down_scale, down)):
        if scale.dtype is not torch.float32 or not scale.is_contiguous() or not scale.is_cpu:
            return "the scales are not contiguous float32 on the CPU"
        if scale.numel() * weight.shape[2] != weight.numel():
            return OTHER_SHAPE
    if gate_up.shape[2] > EXACT_K or down.shape[2] > EXACT_K:
        return f"K is over {EXACT_K}: int32 sums might overflow"
    return _accepts(hidden, top_k_index, top_k_weights, gate_up, down)


def _accepts(
    hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> str | None:
    if not (hidden.is_cpu and index.is_cpu and weights.is_cpu and gate_up.is_cpu and down.is_cpu):
        return NOT_CPU
    if hidden.dtype not in FLOAT_CODES or weights.dtype not in FLOAT_CODES:
        return NOT_FLOAT
    if index.dtype is not torch.int64:
        return "expert numbers are not int64"
    if not (gate_up.is_contiguous() and down.is_contiguous()):
        return NOT_CONTIGUOUS
    experts, size, intermediate = down.shape
    if hidden.dim() != 2 or hidden.shape[1] != size or gate_up.shape != (experts, 2 * intermediate, size):
        return OTHER_SHAPE
    if index.shape != weights.shape or index.shape[0] != hidden.shape[0]:
        return OTHER_SHAPE
    return None if hidden.numel() and index.numel() and down.numel() else EMPTY
