"""Quantization that the vendor fuses with a norm or a gated activation: float32 within, rounded to codes at the end."""

from __future__ import annotations

import torch

from porter.kernels.ascend.catalogue.grouped_matmul_rules import UNDEFINED_BYTE
from porter.kernels.ascend.catalogue.vendor_op import Call
from porter.kernels.ascend.emulator.norm import normed
from porter.kernels.ascend.emulator.quantization import per_token, to_int8


def npu_add_rms_norm_quant(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, codes of the second scales, sum): the norm of the rounded sum, divided or multiplied by the scales."""
    wide, total = _normed(call)

    def codes(scales: torch.Tensor | None, points: torch.Tensor | None) -> torch.Tensor:
        if scales is None:
            return torch.full(total.shape, UNDEFINED_BYTE, dtype=torch.int8)
        scaled = wide / scales.float() if call["div_mode"] else wide * scales.float()
        return to_int8(scaled if points is None else scaled + points.float())

    first = codes(call["scales1"], call["zero_points1"])
    return first, codes(call["scales2"], call["zero_points2"]), total


def npu_add_rms_norm_dynamic_quant(call: Call) -> tuple[torch.Tensor, ...]:
    """(codes, codes, sum, scale, scale), those left out by output_mask empty."""
    wide, total = _normed(call)
    found = []
    for kept, smooth in zip(call["output_mask"], (call["smooth_scale1"], call["smooth_scale2"]), strict=True):
        if not kept:
            found.append((torch.empty(0, dtype=torch.int8), torch.empty(0)))
            continue
        found.append(per_token(wide if smooth is None else wide * smooth.float()))
    (first, first_scale), (second, second_scale) = found
    return first, second, total, first_scale, second_scale


def _normed(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x1 + x2 in float32, and the sum in their dtype."""
    total: torch.Tensor = call["x1"] + call["x2"]
    wide, _ = normed(total.float(), call["gamma"].float(), call["epsilon"])
    return (wide if call["beta"] is None else wide + call["beta"].float()), total


def npu_dequant_swiglu_quant(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [tokens, H], scale [tokens]) of x [tokens, 2H]: scaled, gated, then quantized per token.

    `group_index` counts the rows of each group; what lies past their sum stays as it was in memory.
    """
    x, groups = call["x"].float(), call["group_index"]
    counts = [x.shape[0]] if groups is None else [int(n) for n in groups]
    rows = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    valid = len(rows)
    x = x[:valid]
    if call["weight_scale"] is not None:
        x = x * call["weight_scale"][rows]
    if call["activation_scale"] is not None:
        x = x * call["activation_scale"][:valid]
    gated = _gated(call, x)
    if call["quant_scale"] is not None:
        gated = gated * call["quant_scale"].float()[rows]
    written, scale = per_token(gated)
    tokens = call["x"].shape[0]
    codes = torch.full((tokens, gated.shape[-1]), UNDEFINED_BYTE, dtype=torch.int8)
    scales = torch.full((tokens,), float("nan"))
    codes[:valid], scales[:valid] = written, scale
    return codes, scales


def _gated(call: Call, x: torch.Tensor) -> torch.Tensor:
    """swish of one half times the other; in modes 1 and 2 clamped, with a factor in the sigmoid and a bias."""
    mode: int = call["swiglu_mode"]
    gate, up = (x[..., 0::2], x[..., 1::2]) if mode == 1 else x.chunk(2, dim=-1)
    if mode != 1 and not call["activate_left"]:
        gate, up = up, gate
    if mode == 0:
        return gate * torch.sigmoid(gate) * up
    limit, alpha, bias = (float(call[name]) for name in ("clamp_limit", "glu_alpha", "glu_bias"))
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + bias)


SEMANTICS = {
    "npu_add_rms_norm_quant": npu_add_rms_norm_quant,
    "npu_add_rms_norm_dynamic_quant": npu_add_rms_norm_dynamic_quant,
    "npu_dequant_swiglu_quant": npu_dequant_swiglu_quant,
}
