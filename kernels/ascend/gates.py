"""Gates by torch's own elementwise operators, which torch_npu implements: the vendor fuses none of them."""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.catalogue.vendor_op import VendorRefusal
from porter.kernels.ascend.dry_run import Kernel
from porter.kernels.ascend.vendor import TORCH_ALONE
from porter.kernels.reference.gates import delta_gates_softplus, sigmoid_gate_standard


def delta_gates(torch_npu: Any, a: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Decay and beta of the gated delta rule, as the Op defines them."""
    _refuse_float64(a)
    return delta_gates_softplus(a, *others)


def sigmoid_gate(torch_npu: Any, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """hidden_states times sigmoid(gate), as the Op defines it."""
    _refuse_float64(hidden_states)
    return sigmoid_gate_standard(hidden_states, gate)


def _refuse_float64(tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.float64:
        raise VendorRefusal("torch_npu casts float64 to float32")


KERNELS: dict[tuple[str, str], Kernel] = {
    ("delta_gates", "softplus"): delta_gates,
    ("sigmoid_gate", "standard"): sigmoid_gate,
}
EVIDENCE = dict.fromkeys(KERNELS, TORCH_ALONE)
"""Of the kernels that make no call of torch_npu."""
