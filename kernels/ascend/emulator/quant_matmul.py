"""Products over int8 weights as the vendor documents them: integer sums exact, scales in float32, one rounding."""

from __future__ import annotations

import torch

from porter.kernels.ascend.catalogue.quantization_dtypes import as_dtype
from porter.kernels.ascend.catalogue.vendor_op import Call
from porter.kernels.ascend.emulator.quantization import float_bits, to_int8

FP19 = 0xFFFFE000
"""The bits of a float32 that the scale of the matrix unit's own output keeps (npu_trans_quant_param)."""


def npu_quant_matmul(call: Call) -> torch.Tensor:
    """(x1 @ x2 + integer bias) * scale * pertoken_scale + floating bias + offset."""
    dtype, bias, rows = as_dtype(call["output_dtype"]) or torch.int8, call["bias"], call["pertoken_scale"]
    # Doubles hold the products of 65535 pairs of int8 exactly.
    total = (call["x1"].double() @ call["x2"].double()).to(torch.int64)
    if bias is not None and bias.dtype == torch.int32:
        total = total + bias
    out: torch.Tensor = total.to(torch.int32).float() * _scale(call, dtype)
    if rows is not None:
        out = out * rows[:, None]
    if bias is not None and bias.is_floating_point():
        out = out + bias.float()
    if call["offset"] is not None:
        out = out + call["offset"]
    return to_int8(out) if dtype == torch.int8 else out.to(dtype)


def _scale(call: Call, dtype: torch.dtype) -> torch.Tensor:
    """The scales as they are applied: by the matrix unit's output stage in 19 bits, else by the vector unit."""
    scale: torch.Tensor = call["scale"]
    if scale.dtype == torch.int64:
        return float_bits(scale)
    if call["pertoken_scale"] is not None or dtype == torch.bfloat16:
        return scale.float()
    return (scale.contiguous().view(torch.int32).to(torch.int64) & FP19).to(torch.int32).view(torch.float32)


def npu_weight_quant_batchmatmul(call: Call) -> torch.Tensor:
    """x @ ((weight + offset) * scale) + bias; the matrix unit takes operands of one dtype, so the weight is rounded to
    that of x."""
    x: torch.Tensor = call["x"]
    weight: torch.Tensor = call["weight"].float()
    group: int = call["antiquant_group_size"]

    def spread(values: torch.Tensor) -> torch.Tensor:
        wide = values.float()
        return wide.repeat_interleave(group, dim=0)[: weight.shape[0]] if group else wide.reshape(1, -1)

    if call["antiquant_offset"] is not None:
        weight = weight + spread(call["antiquant_offset"])
    weight = (weight * spread(call["antiquant_scale"])).to(x.dtype)
    out = x.float() @ weight.float()
    if call["bias"] is not None:
        out = out + call["bias"].float().reshape(-1)
    return out.to(x.dtype)


SEMANTICS = {"npu_quant_matmul": npu_quant_matmul, "npu_weight_quant_batchmatmul": npu_weight_quant_batchmatmul}
