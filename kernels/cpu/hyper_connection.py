"""Hyper-connections on the CPU: reading residual streams as one, and writing them back mixed."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

import torch

from porter.kernels.cpu.layout import EMPTY, FLOAT_CODES, NOT_CPU, NOT_FLOAT, OTHER_SHAPE, threads_for
from porter.kernels.cpu.library import KernelLibrary

Mixing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Collapse = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, float, int], Mixing]
Expand = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, float], torch.Tensor]

NOT_FLOAT32 = "the mixing weights are not contiguous float32 on the CPU"

_pack_four = Struct("4q").pack
_pack_three = Struct("3q").pack


def collapse(library: KernelLibrary) -> Collapse:
    """The stream that a block reads, and the weights with which its output is written back."""

    def call(
        streams: torch.Tensor,
        fn: torch.Tensor,
        base: torch.Tensor,
        scale: torch.Tensor,
        norm_eps: float,
        eps: float,
        iterations: int,
    ) -> Mixing:
        batch, length, count, size = streams.shape
        x = streams.contiguous()
        post = torch.empty((batch, length, count), dtype=torch.float32)
        comb = torch.empty((batch, length, count, count), dtype=torch.float32)
        collapsed = torch.empty((batch, length, size), dtype=x.dtype)
        library.hyper_collapse(
            post.data_ptr(), comb.data_ptr(), collapsed.data_ptr(), x.data_ptr(), fn.data_ptr(), base.data_ptr(),
            scale.data_ptr(), _pack_four(batch * length, count, size, iterations), norm_eps, eps, FLOAT_CODES[x.dtype],
            threads_for(4 * fn.numel()),
        )
        return post, comb, collapsed

    return call


def head(library: KernelLibrary) -> Head:
    """The weighted sum of the streams."""

    def call(
        streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, norm_eps: float, eps: float
    ) -> torch.Tensor:
        batch, length, count, size = streams.shape
        x = streams.contiguous()
        collapsed = torch.empty((batch, length, size), dtype=x.dtype)
        library.hyper_collapse(
            None, None, collapsed.data_ptr(), x.data_ptr(), fn.data_ptr(), base.data_ptr(), scale.data_ptr(),
            _pack_four(batch * length, count, size, 0), norm_eps, eps, FLOAT_CODES[x.dtype],
            threads_for(4 * fn.numel()),
        )
        return collapsed

    return call


def expand(library: KernelLibrary) -> Expand:
    """The output added to every stream, and the streams mixed."""

    def call(streams: torch.Tensor, output: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        batch, length, count, size = streams.shape
        x, added = streams.contiguous(), output.contiguous()
        post, comb = post.contiguous(), comb.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        library.hyper_expand(
            out.data_ptr(), x.data_ptr(), added.data_ptr(), post.data_ptr(), comb.data_ptr(),
            _pack_three(batch * length, count, size), FLOAT_CODES[x.dtype], threads_for(8 * x.numel()),
        )
        return out

    return call


def accepts_collapse(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> str | None:
    """float32 or bfloat16 streams [B, S, N, D]; float32 weights, contiguous."""
    return _accepts(streams, fn, base, scale, 3)


def accepts_head(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, norm_eps: float, eps: float
) -> str | None:
    """As `accepts_collapse`."""
    return _accepts(streams, fn, base, scale, 1)


def accepts_expand(streams: torch.Tensor, output: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> str | None:
    """Streams and output of one dtype, float32 or bfloat16; float32 weights."""
    if not (streams.is_cpu and output.is_cpu and post.is_cpu and comb.is_cpu):
        return NOT_CPU
    if streams.dtype not in FLOAT_CODES or output.dtype is not streams.dtype:
        return NOT_FLOAT
    if post.dtype is not torch.float32 or comb.dtype is not torch.float32:
        return "the mixing weights are not float32"
    if streams.dim() != 4:
        return OTHER_SHAPE
    batch, length, count, size = streams.shape
    if output.shape != (batch, length, size) or post.shape != (batch, length, count):
        return OTHER_SHAPE
    if comb.shape != (batch, length, count, count):
        return OTHER_SHAPE
    return None if streams.numel() else EMPTY


def _accepts(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, parts: int
) -> str | None:
    if not streams.is_cpu:
        return NOT_CPU
    if streams.dtype not in FLOAT_CODES:
        return NOT_FLOAT
    for weight in (fn, base, scale):
        if weight.dtype is not torch.float32 or not weight.is_cpu or not weight.is_contiguous():
            return NOT_FLOAT32
    if streams.dim() != 4:
        return OTHER_SHAPE
    count, size = streams.shape[2:]
    rows = count if parts == 1 else (2 + count) * count
    if fn.shape != (rows, count * size) or base.numel() != rows or scale.numel() != parts:
        return OTHER_SHAPE
    return None if streams.numel() else EMPTY
