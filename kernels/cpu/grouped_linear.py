"""Block-diagonal linear layers on the CPU: the plain product, group by group."""

from __future__ import annotations

from collections.abc import Callable

import torch

from porter.kernels.cpu.layout import NOT_CONTIGUOUS, NOT_CPU, OTHER_SHAPE
from porter.kernels.cpu.library import KernelLibrary
from porter.kernels.cpu.linear import accepts_linear, linear

GroupedLinear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def grouped_linear(library: KernelLibrary) -> GroupedLinear:
    """x [..., G, K] times the rows of each group."""
    project = linear(library)

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        groups = x.shape[-2]
        rows = weight.shape[0] // groups
        parts = [project(x[..., g, :], weight[g * rows : (g + 1) * rows], None) for g in range(groups)]
        return torch.stack(parts, dim=-2)

    return call


def accepts_grouped_linear(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    """As linear/standard without a bias, for [..., G, K]."""
    if not (x.is_cpu and weight.is_cpu):
        return NOT_CPU
    if x.dim() < 2 or weight.dim() != 2 or not x.shape[-2] or weight.shape[0] % x.shape[-2]:
        return OTHER_SHAPE
    if not weight.is_contiguous():
        return NOT_CONTIGUOUS
    return accepts_linear(x, weight, None)
