"""Grouped products fused with the gated activation before them, or the sum over experts after them."""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.catalogue.grouped_matmul_rules import (
    INNER_LIMIT,
    columns,
    combination,
    covers,
    group_list_rules,
    is_int4,
    shape_of,
    single,
    sole,
    transposed,
)
from porter.kernels.ascend.catalogue.quantization_dtypes import dtype_one_of
from porter.kernels.ascend.catalogue.rules import absent, dtypes, one_of, rank, size, that
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, PAGES, Call, Rule, VendorOp

ACLNN = "cann ops-transformer gmm/grouped_matmul_swiglu_quant_v2/docs/aclnnGroupedMatmulSwigluQuantV2.md"
WIDEST = 10240
INT4_INPUTS = 20000
INT4_ROUTED = (2048, 7168)
"""K and N of the one int4 product that npu_grouped_matmul_finalize_routing has."""


def _halves(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    x, outputs = call["x"], sole(call, "weight_scale").shape[-1]
    return x.new_empty((x.shape[0], outputs // 2)), x.new_empty(x.shape[0], dtype=torch.float32)


def _halves_and_offset(call: Call) -> Any:
    return *_halves(call), call["x"].new_empty((), dtype=torch.float32)


def _routed(call: Call) -> Any:
    x = call["x"]
    return x.new_empty((call["output_bs"] or x.shape[0], columns(call["w"])), dtype=torch.float32)


def _scale(call: Call) -> tuple[int, ...]:
    weight = sole(call, "weight")
    outputs = int(weight.shape[0]), columns(weight)
    groups = sole(call, "weight_scale").shape[1] if call["dequant_mode"] == 1 else 0
    return (outputs[0], int(groups), outputs[1]) if groups else outputs


def _product_rules(weight: str) -> tuple[Rule, ...]:
    return (
        that(
            f"x [rows, K] and {weight} [experts, K, N], not transposed, N even",
            lambda call: (
                call["x"].dim() == 2
                and call["x"].shape[0] > 0
                and sole(call, weight).dim() == 3
                and call["x"].shape[1] == sole(call, weight).shape[1]
                and not transposed(sole(call, weight))
                and columns(sole(call, weight)) % 2 == 0
            ),
            "x",
            weight,
        ),
        *group_list_rules(weight),
    )


def _widths(limit: Any) -> Rule:
    return that(
        f"N at most {WIDEST}, and K below {INNER_LIMIT}, or {INT4_INPUTS} for int4",
        lambda call: columns(sole(call, "weight")) <= WIDEST and call["x"].shape[1] < limit(call),
        "x",
        "weight",
    )


_X_SCALE = shape_of("x_scale", "[rows]", lambda call: (call["x"].shape[0],))

OPS = (
    VendorOp(
        name="npu_grouped_matmul_swiglu_quant",
        schema="(Tensor x, Tensor weight, Tensor group_list, Tensor weight_scale, Tensor x_scale, *, "
        "Tensor? bias=None, Tensor? offset=None) -> (Tensor, Tensor, Tensor)",
        page="docstring of torch_npu.npu_grouped_matmul_swiglu_quant in torch_npu 2.13",
        chips=(A2, A3),
        outputs=_halves_and_offset,
        rules=(
            combination("x weight weight_scale x_scale", "i8/i8/f32/f32 i8/i8/f16/f32 i8/i8/bf16/f32", ()),
            *_product_rules("weight"),
            _widths(lambda call: INNER_LIMIT),
            shape_of("weight_scale", "[experts, N]", lambda c: (c["weight"].shape[0], c["weight"].shape[2])),
            _X_SCALE,
            absent("bias", "offset"),
        ),
        value_rules=(covers(lambda call: 0),),
        nz=("weight",),
        must_be_nz=lambda call: ("weight",),
        note="group_list is prefix sums; weight is read as FRACTAL_NZ whatever it is; the gate is the first half",
    ),
    VendorOp(
        name="npu_grouped_matmul_swiglu_quant_v2",
        schema="(Tensor x, Tensor[] weight, Tensor[] weight_scale, Tensor x_scale, Tensor group_list, *, "
        "Tensor? smooth_scale=None, Tensor[]? weight_assist_matrix=None, Tensor? bias=None, int? dequant_mode=0, "
        "int? dequant_dtype=6, int? quant_mode=0, int? quant_dtype=1, int? group_list_type=0, "
        "int[]? tuning_config=None, int? x_dtype=None, int? weight_dtype=None, int? weight_scale_dtype=None, "
        "int? x_scale_dtype=None) -> (Tensor, Tensor)",
        page=f"{PAGES}torch_npu-npu_grouped_matmul_swiglu_quant_v2.md; weight_assist_matrix: {ACLNN}",
        chips=(A2, A3),
        outputs=_halves,
        rules=(
            single("weight", "weight_scale", "weight_assist_matrix"),
            combination(
                "x weight weight_scale x_scale weight_assist_matrix",
                "i8/i8/f32/f32/- i8/i8/f16/f32/- i8/i8/bf16/f32/- i8/i32/i64/f32/f32",
                (),
            ),
            *_product_rules("weight"),
            _widths(lambda call: INT4_INPUTS if is_int4(call) else INNER_LIMIT),
            that(
                "dequant_mode 0, or 1 for int4 with scales by group of inputs",
                lambda call: call["dequant_mode"] in ((0, 1) if is_int4(call) else (0,)),
                "dequant_mode",
                "weight",
            ),
            that(
                "weight_scale [experts, groups of inputs, N] where dequant_mode is 1, groups dividing K",
                lambda call: (
                    call["dequant_mode"] == 0
                    or (
                        sole(call, "weight_scale").dim() == 3
                        and call["x"].shape[1] % max(sole(call, "weight_scale").shape[1], 1) == 0
                    )
                ),
                "weight_scale",
                "dequant_mode",
            ),
            shape_of("weight_scale", "[experts, N], or [experts, groups, N] where dequant_mode is 1", _scale),
            shape_of(
                "weight_assist_matrix",
                "[experts, N]",
                lambda call: (sole(call, "weight").shape[0], columns(sole(call, "weight"))),
            ),
            _X_SCALE,
            one_of("group_list_type", 0, 1),
            one_of("quant_mode", 0),
            dtype_one_of("dequant_dtype", torch.float32),
            dtype_one_of("quant_dtype", torch.int8),
            absent("smooth_scale", "bias", "tuning_config"),
            absent("x_dtype", "weight_dtype", "weight_scale_dtype", "x_scale_dtype"),
        ),
        value_rules=(covers(lambda call: call["group_list_type"]),),
        explicit=("dequant_mode", "dequant_dtype", "quant_mode", "quant_dtype", "group_list_type"),
        nz=("weight",),
        must_be_nz=lambda call: () if is_int4(call) else ("weight",),
        note="the gate is the first half; int8 weights are read as FRACTAL_NZ; int4 is packed by eight in int32 and "
        "needs weight_assist_matrix = 8 * sum(weight * scale)",
    ),
    VendorOp(
        name="npu_grouped_matmul_finalize_routing",
        schema="(Tensor x, Tensor w, Tensor group_list, *, Tensor? scale=None, Tensor? bias=None, Tensor? offset=None, "
        "Tensor? pertoken_scale=None, Tensor? shared_input=None, Tensor? logit=None, Tensor? row_index=None, "
        "ScalarType? dtype=None, float? shared_input_weight=1., int? shared_input_offset=0, int? output_bs=0, "
        "int? group_list_type=1, int[]? tuning_config=None, int? x_dtype=None, int? w_dtype=None, "
        "int? scale_dtype=None, int? pertoken_scale_dtype=None) -> Tensor",
        page=PAGES + "torch_npu-npu_grouped_matmul_finalize_routing.md",
        chips=(A2, A3),
        outputs=_routed,
        rules=(
            combination("x w scale bias pertoken_scale", "i8/i8/f32/-/f32 i8/i32/i64/f32/f32", ()),
            *_product_rules("w"),
            size("w", 0, "at most 256", lambda n: n <= 256),
            size("x", 0, "at most 131072", lambda n: n <= 131072),
            that(
                "K a multiple of 16 and N of 32 from 256 on; K 2048 and N 7168 of int4",
                lambda call: (
                    (call["x"].shape[1], columns(call["w"])) == INT4_ROUTED
                    if call["w"].dtype == torch.int32
                    else call["x"].shape[1] % 16 == 0 and columns(call["w"]) % 32 == 0 and columns(call["w"]) >= 256
                ),
                "x",
                "w",
            ),
            that(
                "scale [experts, N], or [experts, 1, N] of int4",
                lambda call: (
                    tuple(call["scale"].shape)
                    == (call["w"].shape[0], *((1,) if call["w"].dtype == torch.int32 else ()), columns(call["w"]))
                ),
                "scale",
                "w",
            ),
            that(
                "bias [experts, N]",
                lambda call: (
                    call["bias"] is None or tuple(call["bias"].shape) == (call["w"].shape[0], columns(call["w"]))
                ),
                "bias",
                "w",
            ),
            dtypes("logit row_index", "f32/i64"),
            that(
                "pertoken_scale, logit and row_index, each [rows]",
                lambda call: all(
                    call[name] is not None and tuple(call[name].shape) == (call["x"].shape[0],)
                    for name in ("pertoken_scale", "logit", "row_index")
                ),
                "pertoken_scale",
                "logit",
                "row_index",
            ),
            dtypes("shared_input", "bf16"),
            rank("shared_input", 2),
            one_of("group_list_type", 0, 1),
            dtype_one_of("dtype", None, torch.float32),
            absent("offset", "tuning_config", "x_dtype", "w_dtype", "scale_dtype", "pertoken_scale_dtype"),
            that(
                "shared_input to lie within output_bs rows of N from shared_input_offset on",
                lambda call: (
                    call["shared_input"] is None
                    or (
                        0 <= call["shared_input_offset"]
                        and call["shared_input_offset"] + call["shared_input"].shape[0]
                        <= (call["output_bs"] or call["x"].shape[0])
                        and call["shared_input"].shape[1] == columns(call["w"])
                    )
                ),
                "shared_input",
                "shared_input_offset",
                "output_bs",
            ),
        ),
        value_rules=(covers(lambda call: call["group_list_type"]),),
        explicit=("output_bs", "group_list_type", "shared_input_weight", "shared_input_offset"),
        nz=("w",),
        must_be_nz=lambda call: () if call["w"].dtype == torch.int32 else ("w",),
        note="group_list_type 1, counts, is the default here and nowhere else; output_bs 0 gives as many rows as x "
        "has; int8 weights are read as FRACTAL_NZ",
    ),
)
