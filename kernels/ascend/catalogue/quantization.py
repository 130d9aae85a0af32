"""Quantizing activations, and packing int4 weights."""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.catalogue.quantization_dtypes import dtype_one_of
from porter.kernels.ascend.catalogue.rules import absent, contiguous, dtypes, multiple, one_of, rank, size, that
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, I310P, PAGES, Call, VendorOp


def _dynamic_quant(call: Call) -> Any:
    x = call["input"]
    return torch.empty(x.shape, dtype=torch.int8, device=x.device), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _quantize(call: Call) -> Any:
    x = call["input"]
    return torch.empty(x.shape, dtype=torch.int8, device=x.device)


def _int4pack(call: Call) -> Any:
    weight = call["weight"]
    return weight.new_empty((*weight.shape[:-1], weight.shape[-1] // 8))


def _along_axis(name: str) -> Any:
    """1-D with one value for each along `axis` of the input."""
    return that(
        f"{name} of 1 dimension with one value for each along axis of input (repeat a single one)",
        lambda call: call[name] is None or (call[name].dim() == 1 and _axis_length(call) == call[name].shape[0]),
        "input",
        name,
        "axis",
    )


def _axis_length(call: Call) -> int | None:
    x, axis = call["input"], int(call["axis"])
    return int(x.shape[axis]) if -x.dim() <= axis < x.dim() else None


_MULTIPLIED = that(
    "scales (and zero_points) of the dtype of input where div_mode is False",
    lambda call: (
        call["div_mode"]
        or all(t is None or t.dtype == call["input"].dtype for t in (call["scales"], call["zero_points"]))
    ),
    "input",
    "scales",
    "zero_points",
)
_LAST_AXIS = that(
    "axis to be the last where div_mode is False (any axis but -2 is taken as the last)",
    lambda call: call["div_mode"] or call["axis"] in (-1, call["input"].dim() - 1),
    "input",
    "axis",
)


def _divided(scales: str, points: str, chips: tuple[str, ...]) -> Any:
    """The dtypes of scales and zero_points where div_mode is True; where it is False `_MULTIPLIED` says them."""
    first, second = (dtypes(n, t) for n, t in (("scales", scales), ("zero_points", points)))
    return that(
        f"{first.says}, {second.says} where div_mode is True",
        lambda call: not call["div_mode"] or (first.holds(call) and second.holds(call)),
        "scales",
        "zero_points",
        chips=chips,
    )


OPS = (
    VendorOp(
        name="npu_dynamic_quant",
        schema="(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, int? dst_type=None, "
        'str quant_mode="pertoken", float dst_type_max=0.) -> (Tensor, Tensor)',
        page=PAGES + "torch_npu-npu_dynamic_quant.md",
        chips=(A2, A3),
        outputs=_dynamic_quant,
        rules=(
            dtypes("input", "f16 bf16"),
            that("input of more than 1 dimension", lambda call: call["input"].dim() > 1, "input"),
            dtypes("smooth_scales", "f16 bf16"),
            that(
                "smooth_scales of 1 dimension, one for each of the last of input",
                lambda call: call["smooth_scales"] is None or call["smooth_scales"].shape == call["input"].shape[-1:],
                "input",
                "smooth_scales",
            ),
            absent("group_index"),
            dtype_one_of("dst_type", None, torch.int8),
            one_of("quant_mode", "pertoken"),
            one_of("dst_type_max", 0.0),
        ),
        note="symmetric: scale = largest magnitude of the row / 127, without the last dimension; float32 is not taken",
    ),
    VendorOp(
        name="npu_quantize",
        schema="(Tensor input, Tensor scales, Tensor? zero_points, int dtype, int axis=1, bool div_mode=True) "
        "-> Tensor",
        page=PAGES + "torch_npu-npu_quantize.md",
        chips=(A2, A3, I310P),
        outputs=_quantize,
        rules=(
            dtypes("input", "f16 bf16 f32", (A2, A3)),
            dtypes("input", "f16 f32", (I310P,)),
            _divided("f32 bf16", "i8 u8 i32 bf16", (A2, A3)),
            _divided("f32", "i8 u8 i32", (I310P,)),
            that("div_mode to be True", lambda call: call["div_mode"], "div_mode", chips=(I310P,)),
            _MULTIPLIED,
            _LAST_AXIS,
            _along_axis("scales"),
            _along_axis("zero_points"),
            dtype_one_of("dtype", torch.qint8),
        ),
        explicit=("axis", "div_mode"),
        note="div_mode True divides by scales, False multiplies: their reciprocals then; axis 1 is not the last of 3",
    ),
    VendorOp(
        name="npu_convert_weight_to_int4pack",
        schema="(Tensor weight, int inner_k_tiles=0) -> Tensor",
        page=PAGES + "torch_npu-npu_convert_weight_to_int4pack.md",
        chips=(A2, A3),
        outputs=_int4pack,
        rules=(
            dtypes("weight", "i32"),
            rank("weight", 2),
            contiguous("weight"),
            multiple("weight", -1, 8),
            size("weight", -2, "at least 1", lambda n: n >= 1),
            one_of("inner_k_tiles", 0),
        ),
        value_rules=(
            that(
                "weight within [-8, 7]",
                lambda call: (
                    not call["weight"].numel() or (int(call["weight"].min()) >= -8 and int(call["weight"].max()) <= 7)
                ),
                "weight",
            ),
        ),
        note="eight values of the last dimension in one int32, the first in the lowest four bits",
    ),
)
