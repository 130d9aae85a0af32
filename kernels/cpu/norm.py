"""RMSNorm, its fusion with the residual sum, and SwiGLU on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from porter.kernels.cpu.layout import (
    EMPTY,
    FLOAT_CODES,
    NOT_CONTIGUOUS,
    NOT_CPU,
    NOT_FLOAT,
    OTHER_DTYPE,
    OTHER_SHAPE,
    rows_of,
    threads_for,
)
from porter.kernels.cpu.library import KernelLibrary

Norm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
AddNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
GatedNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


_DTYPES = {(x, weight): FLOAT_CODES[x] | FLOAT_CODES[weight] << 8 for x in FLOAT_CODES for weight in FLOAT_CODES}


def rms_norm(library: KernelLibrary, offset: float) -> Norm:
    """rms_norm with weight + `offset`: 0 for the standard variant, 1 for zero_centered."""

    def call(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x, stride = rows_of(hidden_states)
        size = x.shape[-1]
        count = x.numel()
        out = torch.empty(x.shape, dtype=x.dtype)
        library.rms_norm(
            out.data_ptr(), None, x.data_ptr(), None, weight.data_ptr(), None, count // size, size, stride, 0, 0, eps,
            offset, _DTYPES[x.dtype, weight.dtype], threads_for(4 * count),
        )
        return out

    return call


def unweighted_rms_norm(library: KernelLibrary) -> Callable[[torch.Tensor, float], torch.Tensor]:
    """rms_norm without a weight."""

    def call(hidden_states: torch.Tensor, eps: float) -> torch.Tensor:
        x, stride = rows_of(hidden_states)
        size = x.shape[-1]
        count = x.numel()
        out = torch.empty(x.shape, dtype=x.dtype)
        library.rms_norm(
            out.data_ptr(), None, x.data_ptr(), None, None, None, count // size, size, stride, 0, 0, eps, 0.0,
            FLOAT_CODES[x.dtype], threads_for(4 * count),
        )
        return out

    return call


def gated_rms_norm(library: KernelLibrary) -> GatedNorm:
    """rms_norm times silu(gate)."""

    def call(hidden_states: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
        x, stride = rows_of(hidden_states)
        gates, gate_stride = rows_of(gate)
        size = x.shape[-1]
        count = x.numel()
        out = torch.empty(x.shape, dtype=x.dtype)
        library.rms_norm(
            out.data_ptr(), None, x.data_ptr(), None, weight.data_ptr(), gates.data_ptr(), count // size, size, stride,
            0, gate_stride, eps, 0.0, _DTYPES[x.dtype, weight.dtype], threads_for(8 * count),
        )
        return out

    return call


def add_rms_norm(library: KernelLibrary, offset: float) -> AddNorm:
    """The sum with the residual, and rms_norm of that sum as rounded to its dtype."""

    def call(
        hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, stride = rows_of(hidden_states)
        added, residual_stride = rows_of(residual)
        size = x.shape[-1]
        count = x.numel()
        out = torch.empty(x.shape, dtype=x.dtype)
        total = torch.empty(x.shape, dtype=x.dtype)
        library.rms_norm(
            out.data_ptr(), total.data_ptr(), x.data_ptr(), added.data_ptr(), weight.data_ptr(), None, count // size,
            size, stride, residual_stride, 0, eps, offset, _DTYPES[x.dtype, weight.dtype], threads_for(8 * count),
        )
        return out, total

    return call


def clamped_swiglu(library: KernelLibrary) -> Callable[[torch.Tensor, float], torch.Tensor]:
    """swiglu with the gate clamped from above and the other half on both sides."""

    def call(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
        x, stride = rows_of(gate_up)
        shape = x.shape
        size = shape[-1] // 2
        count = x.numel()
        out = torch.empty((*shape[:-1], size), dtype=x.dtype)
        library.swiglu_clamped(
            out.data_ptr(), x.data_ptr(), count // shape[-1], size, stride, limit, FLOAT_CODES[x.dtype],
            threads_for(6 * count),
        )
        return out

    return call


def swiglu(library: KernelLibrary) -> Callable[[torch.Tensor], torch.Tensor]:
    """silu(first half) * second half of the last dimension."""

    def call(gate_up: torch.Tensor) -> torch.Tensor:
        x, stride = rows_of(gate_up)
        shape = x.shape
        size = shape[-1] // 2
        count = x.numel()
        out = torch.empty((*shape[:-1], size), dtype=x.dtype)
        library.swiglu(
            out.data_ptr(), x.data_ptr(), count // shape[-1], size, stride, FLOAT_CODES[x.dtype], threads_for(6 * count)
        )
        return out

    return call


def accepts_rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> str | None:
    """CPU tensors, each float32 or bfloat16."""
    if not (hidden_states.is_cpu and weight.is_cpu):
        return NOT_CPU
    if hidden_states.dtype not in FLOAT_CODES or weight.dtype not in FLOAT_CODES:
        return NOT_FLOAT
    if not weight.is_contiguous():
        return NOT_CONTIGUOUS
    if weight.numel() != hidden_states.shape[-1]:
        return OTHER_SHAPE
    return None if hidden_states.numel() else EMPTY


def accepts_second(
    hidden_states: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, eps: float
) -> str | None:
    """As `accepts_rms_norm`, with another tensor of the shape and dtype of the first."""
    if other.dtype is not hidden_states.dtype or not other.is_cpu:
        return OTHER_DTYPE
    if other.shape != hidden_states.shape:
        return "the two activations differ in shape"
    return accepts_rms_norm(hidden_states, weight, eps)


def accepts_gated(hidden_states: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> str | None:
    """As `accepts_second`, with the arguments of the gated variant."""
    return accepts_second(hidden_states, gate, weight, eps)


def accepts_unweighted(hidden_states: torch.Tensor, eps: float) -> str | None:
    """A CPU tensor, float32 or bfloat16."""
    if not hidden_states.is_cpu:
        return NOT_CPU
    if hidden_states.dtype not in FLOAT_CODES:
        return NOT_FLOAT
    return None if hidden_states.numel() else EMPTY


def accepts_clamped(gate_up: torch.Tensor, limit: float) -> str | None:
    """As `accepts_swiglu`."""
    return accepts_swiglu(gate_up)


def accepts_swiglu(gate_up: torch.Tensor) -> str | None:
    """A CPU tensor, float32 or bfloat16."""
    if not gate_up.is_cpu:
        return NOT_CPU
    if gate_up.dtype not in FLOAT_CODES:
        return NOT_FLOAT
    if gate_up.shape[-1] % 2:
        return OTHER_SHAPE
    return None if gate_up.numel() else EMPTY
