"""Faults in products of quantized weights."""

from __future__ import annotations

from benchmarks.ascend_faults.fault import Fault, Found, Place, Refused, kernel
from benchmarks.ascend_faults.norms_and_activations import FIRST

W8A8 = Place("tiny-qwen3", "w8a8")
STATIC = Place("tiny-qwen3", "w8a8_static")
W8A16 = Place("tiny-qwen3", "w8a16")
QKV = r"layers\.0\.self_attn\.qkv_proj$"

FAULTS = (
    Fault(
        "output-dtype-left-out",
        "npu_quant_matmul gives int8 unless output_dtype is given",
        W8A8,
        (kernel("linear", "                output_dtype=x.dtype,\n", ""),),
        Refused(("npu_quant_matmul", "output_dtype", "left out")),
    ),
    Fault(
        "weight-not-transposed",
        "x2 of npu_quant_matmul is [K, N] (vllm-ascend #3850)",
        W8A8,
        (
            kernel(
                "linear", "block.t(),\n                weight_scale[rows]", "block,\n                weight_scale[rows]"
            ),
        ),
        Refused(("npu_quant_matmul", "x2")),
    ),
    Fault(
        "token-scale-missing",
        "the scales of the rows",
        W8A8,
        (kernel("linear", "pertoken_scale=scale", "pertoken_scale=None"),),
        Found(QKV, ("scale-missing",)),
        FIRST,
    ),
    Fault(
        "scale-narrow",
        "float16 scales, which the vendor's own shape inference lets through",
        W8A8,
        (kernel("linear", "weight_scale[rows],\n", "weight_scale[rows].half(),\n"),),
        Refused(("npu_quant_matmul", "scale")),
    ),
    Fault(
        "offset-sign",
        "codes are x / scale + offset",
        STATIC,
        (kernel("linear", "input_offset.expand(columns)", "-input_offset.expand(columns)"),),
        Found(QKV, ("constant-offset",)),
        FIRST,
    ),
    Fault(
        "scale-for-its-reciprocal",
        "div_mode False multiplies by the scale",
        STATIC,
        (kernel("linear", "div_mode=True", "div_mode=False"),),
        Refused(("npu_quantize", "scales", "div_mode")),
    ),
    Fault(
        "offset-not-corrected",
        "quant_bias undoes the offset of the activations",
        STATIC,
        (kernel("linear", "    added = quant_bias\n    if bias", "    added = None\n    if bias"),),
        Found(QKV, ("constant-offset", "bias-missing")),
        FIRST,
    ),
    Fault(
        "weight-offset-added",
        "weights are (code + offset) * scale",
        W8A16,
        (kernel("linear", "antiquant_offset=None", "antiquant_offset=torch.ones_like(power)"),),
        Found(QKV, ("zero-point",)),
        FIRST,
    ),
    Fault(
        "weight-only-not-transposed",
        "the weight of npu_weight_quant_batchmatmul is [K, N]",
        W8A16,
        (kernel("linear", "rows, block.t(), power", "rows, block, power"),),
        Refused(("npu_weight_quant_batchmatmul", "weight")),
    ),
)
