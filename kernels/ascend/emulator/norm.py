"""RMSNorm as the vendor documents it: computed in float32, rounded once to the dtype of the activations."""

from __future__ import annotations

import torch

from porter.kernels.ascend.catalogue.vendor_op import I310P, Call


def npu_rms_norm(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """y = x / sqrt(mean(x^2) + epsilon) * gamma, and the reciprocal root in float32."""
    return normed(call["input"], call["gamma"].float(), call["epsilon"])


def npu_gemma_rms_norm(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """As npu_rms_norm with 1 + gamma, the sum in float32."""
    return normed(call["input"], 1.0 + call["gamma"].float(), call["epsilon"])


def npu_add_rms_norm(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The norm of x1 + x2, where the sum is rounded to their dtype first; the reciprocal root; the sum."""
    total = call["x1"] + call["x2"]
    y, rstd = normed(total, call["gamma"].float(), call["epsilon"])
    return y, torch.full_like(rstd, torch.nan) if call.chip == I310P else rstd, total


def normed(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x over its root mean square along the dimensions of the float32 gamma, times gamma; and the reciprocal root."""
    wide = x.float()
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    rstd = torch.rsqrt(wide.square().mean(dim=dims, keepdim=True) + epsilon)
    return (wide * rstd * gamma).to(x.dtype).contiguous(), rstd


SEMANTICS = {
    "npu_rms_norm": npu_rms_norm,
    "npu_add_rms_norm": npu_add_rms_norm,
    "npu_gemma_rms_norm": npu_gemma_rms_norm,
}
