"""Routers on the CPU: scores and selection in one kernel."""

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
    OTHER_SHAPE,
    rows_of,
    threads_for,
)
from porter.kernels.cpu.library import KernelLibrary

Routing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Softmax = Callable[[torch.Tensor, torch.Tensor, int, bool], Routing]
GroupedSoftmax = Callable[[torch.Tensor, torch.Tensor, int, int, int, float], Routing]
GroupedSigmoid = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int, bool, float], Routing]

PLAIN_SOFTMAX, GROUPED_SIGMOID, GROUPED_SOFTMAX = range(3)
"""The kernel's numbers for its kinds."""

_pack_shape = Struct("9q").pack


def router_softmax(library: KernelLibrary) -> Softmax:
    """The top k of the softmax; logits and weights in the dtype of `hidden`."""

    def call(hidden: torch.Tensor, weight: torch.Tensor, top_k: int, renormalize: bool) -> Routing:
        picks = top_k, 1, 1
        return route(library, hidden, weight, None, hidden.dtype, PLAIN_SOFTMAX, picks, renormalize, 1.0)

    return call


def router_grouped_sigmoid(library: KernelLibrary) -> GroupedSigmoid:
    """The top k of sigmoid plus bias within the best groups; logits and weights in float32."""

    def call(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        top_k: int,
        num_group: int,
        topk_group: int,
        renormalize: bool,
        routed_scaling_factor: float,
    ) -> Routing:
        picks = top_k, num_group, topk_group
        return route(
            library, hidden, weight, bias, torch.float32, GROUPED_SIGMOID, picks, renormalize, routed_scaling_factor
        )

    return call


def router_grouped_softmax(library: KernelLibrary) -> GroupedSoftmax:
    """The top k of the softmax within the best groups; logits and weights in float32."""

    def call(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        top_k: int,
        num_group: int,
        topk_group: int,
        routed_scaling_factor: float,
    ) -> Routing:
        picks = top_k, num_group, topk_group
        return route(
            library, hidden, weight, None, torch.float32, GROUPED_SOFTMAX, picks, False, routed_scaling_factor
        )

    return call


def route(
    library: KernelLibrary,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    kind: int,
    picks: tuple[int, int, int],
    renormalize: bool,
    factor: float,
    chosen: torch.Tensor | None = None,
) -> Routing:
    """Logits and weights in `dtype`; `picks` are experts per token, groups, and groups kept. Experts already `chosen`
    [T, k] are weighed alone, and returned."""
    x, stride = rows_of(hidden)
    (tokens, size), experts, top_k = x.shape, weight.shape[0], picks[0]
    logits = torch.empty((tokens, experts), dtype=dtype)
    weights = torch.empty((tokens, top_k), dtype=dtype)
    indices = torch.empty((tokens, top_k), dtype=torch.int64) if chosen is None else chosen
    shape = _pack_shape(tokens, size, experts, *picks, stride, renormalize, kind)
    library.router(
        logits.data_ptr(), weights.data_ptr(), indices.data_ptr(), x.data_ptr(), weight.data_ptr(),
        None if bias is None else bias.data_ptr(), shape, float(factor), FLOAT_CODES[x.dtype],
        FLOAT_CODES[weight.dtype], FLOAT_CODES[dtype], threads_for(4 * weight.numel()),
    )
    return logits, weights, indices


def accepts_router(hidden: torch.Tensor, weight: torch.Tensor, top_k: int, renormalize: bool) -> str | None:
    """CPU tensors, each float32 or bfloat16; the weight contiguous; at most as many picks as experts."""
    if not (hidden.is_cpu and weight.is_cpu):
        return NOT_CPU
    if hidden.dtype not in FLOAT_CODES or weight.dtype not in FLOAT_CODES:
        return NOT_FLOAT
    if not weight.is_contiguous():
        return NOT_CONTIGUOUS
    if hidden.dim() != 2 or hidden.shape[1] != weight.shape[1] or not 0 < top_k <= weight.shape[0]:
        return OTHER_SHAPE
    return None if hidden.numel() and weight.numel() else EMPTY


def accepts_grouped_sigmoid(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    num_group: int,
    topk_group: int,
    renormalize: bool,
    routed_scaling_factor: float,
) -> str | None:
    """As `accepts_router`, with a contiguous float32 bias, and groups of one size and at least two experts."""
    if bias.dtype is not torch.float32 or not bias.is_contiguous() or not bias.is_cpu:
        return "the bias is not contiguous float32 on the CPU"
    experts = weight.shape[0]
    if experts < 2 * num_group:
        return "a group has fewer than two experts"
    if num_group < 1 or experts % num_group or bias.numel() != experts or not 0 < topk_group <= num_group:
        return OTHER_SHAPE
    return accepts_router(hidden, weight, top_k, renormalize)


def accepts_grouped_softmax(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    top_k: int,
    num_group: int,
    topk_group: int,
    routed_scaling_factor: float,
) -> str | None:
    """As `accepts_router`, with groups of one size."""
    experts = weight.shape[0]
    if num_group < 1 or experts % num_group or not 0 < topk_group <= num_group:
        return OTHER_SHAPE
    return accepts_router(hidden, weight, top_k, False)
