"""Gated delta nets on the CPU: the convolution, the gates, the chunked and the recurrent delta rule."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

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

Pair = tuple[torch.Tensor, torch.Tensor]
Convolution = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"], Pair]
DeltaGates = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], Pair]
DeltaRule = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"], Pair
]

STRIDED = "the last dimension is not contiguous"
NOT_FLOAT32 = "decay, beta or state is not float32"
NOT_FLOAT_GATES = "rates or bias are neither float32 nor bfloat16"

_pack8 = Struct("8q").pack
_pack7 = Struct("7q").pack
_pack19 = Struct("19q").pack


def causal_conv1d(library: KernelLibrary) -> Convolution:
    """silu of the causal convolution, and the last inputs."""

    def call(
        hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None
    ) -> Pair:
        batch, tokens, channels = hidden_states.shape
        kernel = weight.shape[1]
        out = torch.empty((batch, tokens, channels), dtype=hidden_states.dtype)
        following = torch.empty((batch, channels, kernel), dtype=hidden_states.dtype)
        strides = hidden_states.stride()
        state_strides = (0, 0) if state is None else state.stride()[:2]
        library.causal_conv1d(
            out.data_ptr(), following.data_ptr(), hidden_states.data_ptr(), weight.data_ptr(),
            None if bias is None else bias.data_ptr(), None if state is None else state.data_ptr(),
            _pack8(batch, tokens, channels, kernel, strides[0], strides[1], *state_strides),
            FLOAT_CODES[hidden_states.dtype], threads_for(4 * (out.numel() + 3 * following.numel())),
        )
        return out, following

    return call


def accepts_causal_conv1d(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None
) -> str | None:
    """CPU tensors of one dtype, float32 or bfloat16, channels contiguous."""
    if not (hidden_states.is_cpu and weight.is_cpu):
        return NOT_CPU
    dtype, shape = hidden_states.dtype, hidden_states.shape
    if dtype not in FLOAT_CODES:
        return NOT_FLOAT
    if weight.dtype is not dtype or (bias is not None and bias.dtype is not dtype):
        return OTHER_DTYPE
    if not weight.is_contiguous() or (bias is not None and not bias.is_contiguous()):
        return NOT_CONTIGUOUS
    if len(shape) != 3 or weight.dim() != 2:
        return OTHER_SHAPE
    if weight.shape[0] != shape[2] or (bias is not None and bias.numel() != shape[2]):
        return OTHER_SHAPE
    if hidden_states.stride(2) != 1:
        return STRIDED
    if state is not None:
        if state.dtype is not dtype or not state.is_cpu:
            return OTHER_DTYPE
        if state.shape != (shape[0], shape[2], weight.shape[1]):
            return OTHER_SHAPE
        if state.stride(2) != 1:
            return STRIDED
    return None if hidden_states.numel() and weight.numel() else EMPTY


def delta_gates(library: KernelLibrary) -> DeltaGates:
    """(-exp(rates) * softplus(a + bias), beta_scale * sigmoid(b)), both float32."""

    def call(
        a: torch.Tensor, b: torch.Tensor, log_decay_rate: torch.Tensor, time_bias: torch.Tensor, beta_scale: float
    ) -> Pair:
        batch, tokens, groups, size = a.shape
        decay = torch.empty((batch, tokens, groups * size), dtype=torch.float32)
        beta = torch.empty_like(decay)
        library.delta_gates(
            decay.data_ptr(), beta.data_ptr(), a.data_ptr(), b.data_ptr(), log_decay_rate.data_ptr(),
            time_bias.data_ptr(),
            _pack7(batch * tokens, groups, size, _row_stride(a), a.stride(2), _row_stride(b), b.stride(2)),
            beta_scale, FLOAT_CODES[a.dtype], FLOAT_CODES[log_decay_rate.dtype], FLOAT_CODES[time_bias.dtype],
            # An exponential and a logarithm take as long as some 32 bytes from memory.
            threads_for(64 * decay.numel()),
        )
        return decay, beta

    return call


def _row_stride(x: torch.Tensor) -> int:
    """Between tokens of [B, T, ...], whose batches follow one another."""
    return x.stride(1) if x.shape[1] > 1 else x.stride(0)


def accepts_delta_gates(
    a: torch.Tensor, b: torch.Tensor, log_decay_rate: torch.Tensor, time_bias: torch.Tensor, beta_scale: float
) -> str | None:
    """CPU tensors; a and b of one dtype, float32 or bfloat16, with batches that follow one another."""
    if not (a.is_cpu and b.is_cpu and log_decay_rate.is_cpu and time_bias.is_cpu):
        return NOT_CPU
    if a.dtype not in FLOAT_CODES:
        return NOT_FLOAT
    if b.dtype is not a.dtype:
        return OTHER_DTYPE
    if log_decay_rate.dtype not in FLOAT_CODES or time_bias.dtype not in FLOAT_CODES:
        return NOT_FLOAT_GATES
    if a.dim() != 4:
        return OTHER_SHAPE
    batch, tokens, groups, size = a.shape
    if b.shape != a.shape or log_decay_rate.numel() != groups * size or time_bias.numel() != groups * size:
        return OTHER_SHAPE
    if not (log_decay_rate.is_contiguous() and time_bias.is_contiguous()):
        return NOT_CONTIGUOUS
    for x in (a, b):
        if x.stride(3) != 1 and size != 1:
            return STRIDED
        if batch > 1 and tokens > 1 and x.stride(0) != tokens * x.stride(1):
            return "batches do not follow one another"
    return None if a.numel() else EMPTY


def sigmoid_gate(library: KernelLibrary) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """hidden_states * sigmoid(gate)."""

    def call(hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        x, stride = rows_of(hidden_states)
        gates, gate_stride = rows_of(gate)
        size, count = x.shape[-1], x.numel()
        out = torch.empty(x.shape, dtype=x.dtype)
        library.sigmoid_gate(
            out.data_ptr(), x.data_ptr(), gates.data_ptr(), count // size, size, stride, gate_stride,
            gates.shape[-1] != size, FLOAT_CODES[x.dtype], threads_for(6 * count),
        )
        return out

    return call


def accepts_sigmoid_gate(hidden_states: torch.Tensor, gate: torch.Tensor) -> str | None:
    """CPU tensors of one dtype, float32 or bfloat16; a gate per value or per row."""
    if not (hidden_states.is_cpu and gate.is_cpu):
        return NOT_CPU
    if hidden_states.dtype not in FLOAT_CODES:
        return NOT_FLOAT
    if gate.dtype is not hidden_states.dtype:
        return OTHER_DTYPE
    shape, gates = hidden_states.shape, gate.shape
    if gates[:-1] != shape[:-1] or gates[-1] not in (1, shape[-1]):
        return OTHER_SHAPE
    return None if hidden_states.numel() else EMPTY


def gated_delta_rule(library: KernelLibrary, chunked: bool) -> DeltaRule:
    """The outputs and the state after the last token."""

    def call(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor | None,
    ) -> Pair:
        batch, tokens, heads, value_size = value.shape
        key_heads, size = key.shape[2:]
        out = torch.empty((batch, tokens, heads, value_size), dtype=value.dtype)
        following = torch.empty((batch, heads, size, value_size), dtype=torch.float32)
        geometry = _pack19(
            batch, tokens, key_heads, heads, size, value_size, *query.stride()[:3], *key.stride()[:3],
            *value.stride()[:3], *decay.stride()[:2], *beta.stride()[:2],
        )
        library.delta_rule(
            out.data_ptr(), following.data_ptr(), query.data_ptr(), key.data_ptr(), value.data_ptr(),
            decay.data_ptr(), beta.data_ptr(), None if state is None else state.data_ptr(), geometry, chunked,
            FLOAT_CODES[value.dtype], threads_for(8 * following.numel()),
        )
        return out, following

    return call


def accepts_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
) -> str | None:
    """float32 or bfloat16 activations, float32 decay, beta and state; last dimensions contiguous."""
    if not (query.is_cpu and key.is_cpu and value.is_cpu and decay.is_cpu and beta.is_cpu):
        return NOT_CPU
    if value.dtype not in FLOAT_CODES:
        return NOT_FLOAT
    if query.dtype is not value.dtype or key.dtype is not value.dtype:
        return OTHER_DTYPE
    if decay.dtype is not torch.float32 or beta.dtype is not torch.float32:
        return NOT_FLOAT32
    if value.dim() != 4 or key.dim() != 4:
        return OTHER_SHAPE
    batch, tokens, heads, value_size = value.shape
    _, _, key_heads, size = key.shape
    if query.shape != key.shape or key.shape[:2] != (batch, tokens) or not key_heads or heads % key_heads:
        return OTHER_SHAPE
    if decay.shape != (batch, tokens, heads) or beta.shape != decay.shape:
        return OTHER_SHAPE
    if query.stride(3) != 1 or key.stride(3) != 1 or value.stride(3) != 1:
        return STRIDED
    if decay.stride(2) != 1 or beta.stride(2) != 1:
        return STRIDED
    if state is not None:
        if state.dtype is not torch.float32 or not state.is_cpu:
            return NOT_FLOAT32
        if state.shape != (batch, heads, size, value_size):
            return OTHER_SHAPE
        if not state.is_contiguous():
            return NOT_CONTIGUOUS
    return None if value.numel() and size else EMPTY
