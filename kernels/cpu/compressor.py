"""Compression of keys on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

import torch

from porter.kernels.cpu.layout import EMPTY, FLOAT_CODES, NOT_CPU, NOT_FLOAT, OTHER_DTYPE, OTHER_SHAPE, threads_for
from porter.kernels.cpu.library import KernelLibrary

Prior = torch.Tensor | None
Windowed = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Overlapped = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Prior, Prior], torch.Tensor]

STRIDED = "the last dimension is not contiguous"
BIAS = "the position bias is not contiguous float32 on the CPU"
ONE_PRIOR = "one of the priors is missing"

_pack_shape = Struct("5q").pack
_pack_strides = Struct("10q").pack


def windowed(library: KernelLibrary) -> Windowed:
    """One entry per window, of that window alone."""

    def call(kv: torch.Tensor, gate: torch.Tensor, position_bias: torch.Tensor) -> torch.Tensor:
        return _run(library, kv, gate, position_bias, None, None, False)

    return call


def overlapped(library: KernelLibrary) -> Overlapped:
    """One entry per window, of that window and the one before."""

    def call(
        kv: torch.Tensor, gate: torch.Tensor, position_bias: torch.Tensor, prior_kv: Prior, prior_gate: Prior
    ) -> torch.Tensor:
        return _run(library, kv, gate, position_bias, prior_kv, prior_gate, True)

    return call


def _run(
    library: KernelLibrary,
    kv: torch.Tensor,
    gate: torch.Tensor,
    position_bias: torch.Tensor,
    prior_kv: Prior,
    prior_gate: Prior,
    overlap: bool,
) -> torch.Tensor:
    batch, windows, rate, size = kv.shape
    size = size // 2 if overlap else size
    out = torch.empty((batch, windows, size), dtype=kv.dtype)
    priors: tuple[int, ...] = (0, 0, 0, 0)
    if prior_kv is not None and prior_gate is not None:
        priors = *prior_kv.stride()[:2], *prior_gate.stride()[:2]
    library.compress(
        out.data_ptr(), kv.data_ptr(), gate.data_ptr(), position_bias.data_ptr(),
        None if prior_kv is None else prior_kv.data_ptr(), None if prior_gate is None else prior_gate.data_ptr(),
        _pack_shape(batch, windows, rate, size, overlap), _pack_strides(*kv.stride()[:3], *gate.stride()[:3], *priors),
        FLOAT_CODES[kv.dtype], 0 if prior_gate is None else FLOAT_CODES[prior_gate.dtype], threads_for(8 * kv.numel()),
    )
    return out


def accepts_windowed(kv: torch.Tensor, gate: torch.Tensor, position_bias: torch.Tensor) -> str | None:
    """Keys and gates of one dtype, float32 or bfloat16; a contiguous float32 bias."""
    if not (kv.is_cpu and gate.is_cpu):
        return NOT_CPU
    if kv.dtype not in FLOAT_CODES:
        return NOT_FLOAT
    if gate.dtype is not kv.dtype:
        return OTHER_DTYPE
    if position_bias.dtype is not torch.float32 or not position_bias.is_contiguous() or not position_bias.is_cpu:
        return BIAS
    if kv.dim() != 4 or gate.shape != kv.shape or position_bias.shape != kv.shape[2:]:
        return OTHER_SHAPE
    if kv.stride(3) != 1 or gate.stride(3) != 1:
        return STRIDED
    return None if kv.numel() else EMPTY


def accepts_overlapped(
    kv: torch.Tensor, gate: torch.Tensor, position_bias: torch.Tensor, prior_kv: Prior, prior_gate: Prior
) -> str | None:
    """As `accepts_windowed`; the prior gates may be of the other dtype."""
    if (prior_kv is None) != (prior_gate is None):
        return ONE_PRIOR
    if kv.shape[-1] % 2:
        return OTHER_SHAPE
    if prior_kv is not None and prior_gate is not None:
        if not (prior_kv.is_cpu and prior_gate.is_cpu):
            return NOT_CPU
        if prior_kv.dtype is not kv.dtype or prior_gate.dtype not in FLOAT_CODES:
            return OTHER_DTYPE
        wanted = (kv.shape[0], kv.shape[2], kv.shape[-1] // 2)
        if prior_kv.shape != wanted or prior_gate.shape != wanted:
            return OTHER_SHAPE
        if prior_kv.stride(2) != 1 or prior_gate.stride(2) != 1:
            return STRIDED
    return accepts_windowed(kv, gate, position_bias)
