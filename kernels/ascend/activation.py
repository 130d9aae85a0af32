"""Gated activations by torch_npu.

sigmoid_gate and delta_gates are left to the reference: the vendor has no operator for either, and plain torch runs its
elementwise ones.
"""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.dry_run import Kernel


def swiglu(torch_npu: Any, gate_up: torch.Tensor) -> torch.Tensor:
    """npu_swiglu, which takes the gate first."""
    activated: torch.Tensor = torch_npu.npu_swiglu(gate_up.contiguous(), dim=-1)
    return activated


def swiglu_clamped(torch_npu: Any, gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """npu_clipped_swiglu with DeepSeek-V4's numbers in place of GPT-OSS's."""
    activated: torch.Tensor = torch_npu.npu_clipped_swiglu(
        gate_up.contiguous(), group_index=None, dim=-1, alpha=1.0, limit=limit, bias=0.0, interleaved=False
    )
    return activated


KERNELS: dict[tuple[str, str], Kernel] = {("swiglu", "standard"): swiglu, ("swiglu", "clamped"): swiglu_clamped}
