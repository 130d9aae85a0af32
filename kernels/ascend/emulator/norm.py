"""RMSNorm as the vendor documents it: computed in float32, rounded once to the dtype of the activations."""

from __future__ import annotations

import torch

from porter.kernels.ascend.catalogue.vendor_op import Call


def npu_rms_norm(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """y = x / sqrt(mean(x^2) + epsilon) * gamma, and the reciprocal root in float32."""
    return _normed(call["input"], call["gamma"], call["epsilon"])


def npu_add_rms_norm(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The norm of x1 + x2, where the sum is rounded to their dtype first; the reciprocal root; the sum."""
    total = call["x1"] + call["x2"]
    return *_normed(total, call["gamma"], call["epsilon"]), total


def _normed(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    rstd = torch.rsqrt(wide.square().mean(dim=dims, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(x.dtype), rstd


SEMANTICS = {"npu_rms_norm": npu_rms_norm, "npu_add_rms_norm": npu_add_rms_norm}
