"""RMS norms and their fusion with the residual sum by torch_npu.

Norms over 1 + weight are npu_gemma_rms_norm, which ascend-950 and ascend-310p have not. On ascend-950 they are
npu_rms_norm, the weight made whole in float32 first; ascend-310p takes no wider weight, so the reference serves. Where
the weight is wider than the activations, and where a gate follows the norm, everything is computed in float32, so that
the result is rounded once, as the Op's reference rounds it.
"""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.catalogue.vendor_op import VendorRefusal
from porter.kernels.ascend.dry_run import Kernel


def rms_norm(torch_npu: Any, hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """npu_rms_norm, whose second result is the reciprocal root mean square."""
    normed: torch.Tensor = torch_npu.npu_rms_norm(hidden_states, weight, epsilon=eps)[0]
    return normed


def rms_norm_unweighted(torch_npu: Any, hidden_states: torch.Tensor, eps: float) -> torch.Tensor:
    """npu_rms_norm with a weight of ones."""
    return rms_norm(torch_npu, hidden_states, hidden_states.new_ones(hidden_states.shape[-1]), eps)


def rms_norm_zero_centered(
    torch_npu: Any, hidden_states: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """npu_gemma_rms_norm; npu_rms_norm with 1 + weight in float32 where the weight is float32 beside 16 bits."""
    if weight.dtype != hidden_states.dtype:
        return rms_norm_whole_weight(torch_npu, hidden_states, weight, eps)
    normed: torch.Tensor = torch_npu.npu_gemma_rms_norm(hidden_states.contiguous(), weight.contiguous(), epsilon=eps)[0]
    return normed


def rms_norm_whole_weight(
    torch_npu: Any, hidden_states: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """npu_rms_norm with 1 + weight in float32: rounded to 16 bits, the sum would lose what is small of the weight."""
    return rms_norm(torch_npu, hidden_states, 1.0 + weight.float(), eps)


def rms_norm_gated(
    torch_npu: Any, hidden_states: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float
) -> torch.Tensor:
    """npu_rms_norm in float32 times silu(gate); the vendor has no norm with a gate."""
    if hidden_states.dtype == torch.float64:
        raise VendorRefusal("npu_rms_norm: computes in float32, which is less than float64 activations are due")
    normed = rms_norm(torch_npu, hidden_states.float(), weight.float(), eps)
    return (normed * torch.nn.functional.silu(gate.float())).to(hidden_states.dtype)


def add_rms_norm(
    torch_npu: Any, hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_add_rms_norm, whose sum is the third result."""
    normed, _, total = torch_npu.npu_add_rms_norm(hidden_states, residual, weight, epsilon=eps)
    return normed, total


def add_rms_norm_zero_centered(
    torch_npu: Any, hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A sum, then npu_gemma_rms_norm: npu_add_rms_norm would need 1 + weight rounded to the activations' dtype."""
    total = hidden_states + residual
    return rms_norm_zero_centered(torch_npu, total, weight, eps), total


def add_rms_norm_whole_weight(
    torch_npu: Any, hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A sum, then as `rms_norm_whole_weight`."""
    total = hidden_states + residual
    return rms_norm_whole_weight(torch_npu, total, weight, eps), total


KERNELS: dict[tuple[str, str], Kernel] = {
    ("rms_norm", "standard"): rms_norm,
    ("rms_norm", "unweighted"): rms_norm_unweighted,
    ("rms_norm", "zero_centered"): rms_norm_zero_centered,
    ("rms_norm", "gated"): rms_norm_gated,
    ("add_rms_norm", "standard"): add_rms_norm,
    ("add_rms_norm", "zero_centered"): add_rms_norm_zero_centered,
}
ON_950: dict[tuple[str, str], Kernel] = {
    ("rms_norm", "zero_centered"): rms_norm_whole_weight,
    ("add_rms_norm", "zero_centered"): add_rms_norm_whole_weight,
}
"""In place of KERNELS on ascend-950."""
