"""What the tests of the reference Ops share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from porter.kernels.contract import Case
from porter.kernels.registry import default_registry

BOUND = 1e-12


def cases(name: str, variant: str) -> list[Case]:
    return list(default_registry().op(name, variant).inputs(torch.float64))


def reference(name: str, variant: str, *arguments: Any) -> Any:
    return default_registry().op(name, variant).reference(*arguments)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype == torch.float64
    scale = float(theirs.abs().max()) if theirs.numel() else 1.0
    torch.testing.assert_close(ours, theirs, rtol=BOUND, atol=BOUND * max(1.0, scale))


def with_weight(module: nn.Module, weight: torch.Tensor) -> nn.Module:
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


def additive(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
