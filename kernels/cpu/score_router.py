"""DeepSeek-V4's routers on the CPU: the best scores, or those of the experts that a table names."""

from __future__ import annotations

from collections.abc import Callable

import torch

from porter.kernels.cpu.layout import NOT_CPU, OTHER_SHAPE
from porter.kernels.cpu.library import KernelLibrary
from porter.kernels.cpu.router import Routing, accepts_router, route

SqrtSoftplus = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, float], Routing]
Hash = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], Routing]

SQRT_SOFTPLUS, BY_TABLE = 3, 4
"""The kernel's numbers for its kinds."""


def router_sqrtsoftplus(library: KernelLibrary) -> SqrtSoftplus:
    """The top k of the score plus the bias; logits and weights in float32."""

    def call(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, top_k: int, routed_scaling_factor: float
    ) -> Routing:
        picks = top_k, 1, 1
        return route(library, hidden, weight, bias, torch.float32, SQRT_SOFTPLUS, picks, True, routed_scaling_factor)

    return call


def router_hash(library: KernelLibrary) -> Hash:
    """The experts of the table's rows; logits and weights in float32."""

    def call(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        table: torch.Tensor,
        input_ids: torch.Tensor,
        routed_scaling_factor: float,
    ) -> Routing:
        chosen = table[input_ids]
        experts = weight.shape[0]
        # The kernel reads scores at these places.
        if bool(((chosen < 0) | (chosen >= experts)).any()):
            raise IndexError(f"the table of experts by token id names an expert outside the {experts} there are")
        picks = table.shape[1], 1, 1
        return route(
            library, hidden, weight, None, torch.float32, BY_TABLE, picks, True, routed_scaling_factor, chosen
        )

    return call


def accepts_sqrtsoftplus(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, top_k: int, routed_scaling_factor: float
) -> str | None:
    """As router/softmax, with a contiguous float32 bias."""
    if bias.dtype is not torch.float32 or not bias.is_contiguous() or not bias.is_cpu:
        return "the bias is not contiguous float32 on the CPU"
    if bias.numel() != weight.shape[0]:
        return OTHER_SHAPE
    return accepts_router(hidden, weight, top_k, True)


def accepts_hash(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    input_ids: torch.Tensor,
    routed_scaling_factor: float,
) -> str | None:
    """As router/softmax, with an int64 table and int64 token ids."""
    if not (table.is_cpu and input_ids.is_cpu):
        return NOT_CPU
    if table.dtype is not torch.int64 or input_ids.dtype is not torch.int64:
        return "the table or the token ids are not int64"
    if table.dim() != 2 or input_ids.dim() != 1 or input_ids.shape[0] != hidden.shape[0]:
        return OTHER_SHAPE
    return accepts_router(hidden, weight, table.shape[1], True)
