"""Quantization of activations as the vendor documents it: float32 arithmetic, codes rounded half to even."""

from __future__ import annotations

import torch

from porter.kernels.ascend.catalogue.vendor_op import Call


def npu_dynamic_quant(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scale): scale = largest magnitude of the row / 127, after the smoothing factors where given."""
    x = call["input"].float()
    if call["smooth_scales"] is not None:
        x = x * call["smooth_scales"].float()
    return per_token(x)


def per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale of float32 rows. A row of zeros, where the documented quotient is 0 / 0, has codes 0."""
    scale = x.abs().amax(dim=-1) / 127.0
    return to_int8((x / scale[..., None]).nan_to_num(nan=0.0)), scale


def npu_quantize(call: Call) -> torch.Tensor:
    """x / scales + zero_points, or x * scales + zero_points without div_mode, along one axis, saturated to int8."""
    x, points = call["input"].float(), call["zero_points"]
    # Without div_mode every axis but the last but one is taken as the last.
    axis = call["axis"] if call["div_mode"] else -1
    shape = [1] * x.dim()
    shape[axis] = -1
    scales = call["scales"].float().reshape(shape)
    scaled = x / scales if call["div_mode"] else x * scales
    return to_int8(scaled if points is None else scaled + points.float().reshape(shape))


def to_int8(values: torch.Tensor) -> torch.Tensor:
    """Rounded half to even, saturated to [-128, 127]."""
    return values.round().clamp(-128, 127).to(torch.int8)


def float_bits(scale: torch.Tensor) -> torch.Tensor:
    """The float32 in the low half of each int64."""
    return scale.contiguous().view(torch.float32)[..., ::2]


def npu_convert_weight_to_int4pack(call: Call) -> torch.Tensor:
    """Eight values of the last dimension in one int32, the first in the lowest four bits."""
    nibbles = (call["weight"].to(torch.int64) & 0xF).unflatten(-1, (-1, 8))
    packed = (nibbles << torch.arange(0, 32, 4)).sum(dim=-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


SEMANTICS = {
    "npu_dynamic_quant": npu_dynamic_quant,
    "npu_quantize": npu_quantize,
    "npu_convert_weight_to_int4pack": npu_convert_weight_to_int4pack,
}
