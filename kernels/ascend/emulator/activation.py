"""Gated activations as the vendor documents them, in float32, rounded once."""

from __future__ import annotations

import torch

from porter.kernels.ascend.catalogue.vendor_op import Call


def npu_swiglu(call: Call) -> torch.Tensor:
    """a sigmoid(a) b for the halves a, b of input along dim."""
    x: torch.Tensor = call["input"]
    first, second = x.float().chunk(2, dim=call["dim"])
    return (first * torch.sigmoid(first) * second).to(x.dtype).contiguous()


def npu_clipped_swiglu(call: Call) -> torch.Tensor:
    """Over x as [rows, the rest from dim on]: halves or neighbours a and b of a row, clipped, gated, multiplied."""
    x: torch.Tensor = call["x"]
    dim = call["dim"] % x.dim()
    rows = x.float().reshape(x.shape[:dim].numel(), -1)
    first, second = (rows[:, 0::2], rows[:, 1::2]) if call["interleaved"] else rows.chunk(2, dim=1)
    first, second = first.clamp(max=call["limit"]), second.clamp(-call["limit"], call["limit"])
    y: torch.Tensor = first * torch.sigmoid(call["alpha"] * first) * (second + call["bias"])
    if call["group_index"] is not None:
        y[int(call["group_index"].sum()) :] = torch.nan
    return y.to(x.dtype).reshape(*x.shape[:dim], x.shape[dim] // 2, *x.shape[dim + 1 :])


SEMANTICS = {"npu_swiglu": npu_swiglu, "npu_clipped_swiglu": npu_clipped_swiglu}
