"""RMSNorm and its fusion with the residual sum by torch_npu."""

from __future__ import annotations

from typing import Any

import torch


def rms_norm(torch_npu: Any, hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """npu_rms_norm, whose second result is the reciprocal root mean square."""
    normed: torch.Tensor = torch_npu.npu_rms_norm(hidden_states, weight, epsilon=eps)[0]
    return normed


def add_rms_norm(
    torch_npu: Any, hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_add_rms_norm, whose sum is the third result."""
    normed, _, total = torch_npu.npu_add_rms_norm(hidden_states, residual, weight, epsilon=eps)
    return normed, total


KERNELS = {("rms_norm", "standard"): rms_norm, ("add_rms_norm", "standard"): add_rms_norm}
