"""One matrix product for each expert, over rows sorted by expert."""

from __future__ import annotations

from typing import Any

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
from porter.kernels.ascend.catalogue.quantization_dtypes import as_dtype
from porter.kernels.ascend.catalogue.rules import absent, one_of, that
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, I310P, PAGES, Call, VendorOp

NAMES = "x weight bias scale antiquant_scale antiquant_offset per_token_scale output_dtype"
FLOATS = "f16/f16/f16?/-/-/-/-/f16 f32/f32/f32?/-/-/-/-/f32 "
INT8 = "i8/i8/i32?/i64/-/-/-/i8 i8/i8/i32?/bf16/-/-/f32?/bf16 i8/i8/i32?/f32/-/-/f32?/f16 i8/i8/i32?/-/-/-/-/i32 "
INT4 = "i8/i32/f32/i64/-/-/f32/bf16 i8/i32/f32/i64/-/-/f32/f16"
A2_A3 = f"{FLOATS}bf16/bf16/f32?/-/-/-/-/bf16 {INT8}f16/i8/f16?/-/f16/f16/-/f16 bf16/i8/f32?/-/bf16/bf16/-/bf16 {INT4}"
CHIP_950 = (
    f"{FLOATS}bf16/bf16/f32?/-/-/-/-/bf16 bf16/bf16/bf16?/-/-/-/-/bf16 {INT8}i8/i8/i32?/f32/-/-/f32?/bf16 "
    f"f16/i8/f16?/-/f16/f16?/-/f16 bf16/i8/f32?/-/bf16/bf16?/-/bf16 {INT4}"
)
GROUP = 256
"""Inputs for each of which a weight of int4 has a scale."""
INT4_INPUTS = 18432


def _outputs(call: Call) -> Any:
    x, weight = sole(call, "x"), sole(call, "weight")
    return [x.new_empty((x.shape[0], columns(weight)), dtype=as_dtype(call["output_dtype"]) or x.dtype)]


def _per_output(call: Call) -> tuple[int, int]:
    weight = sole(call, "weight")
    return int(weight.shape[0]), columns(weight)


def _scale(call: Call) -> tuple[int, ...]:
    experts, outputs = _per_output(call)
    return (experts, sole(call, "x").shape[1] // GROUP, outputs) if is_int4(call) else (experts, outputs)


def _inner(call: Call) -> bool:
    weight = sole(call, "weight")
    last = weight.shape[-2] if transposed(weight) else columns(weight)
    return bool(sole(call, "x").shape[1] < INNER_LIMIT and last < INNER_LIMIT)


OPS = (
    VendorOp(
        name="npu_grouped_matmul",
        schema="(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]? offset=None, "
        "Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, "
        "Tensor? group_list=None, Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None, "
        "Tensor[]? activation_quant_offset=None, int? split_item=0, int? group_type=None, int? group_list_type=0, "
        "int? act_type=0, int[]? tuning_config=None, int? output_dtype=None, int? x_dtype=None, "
        "int? weight_dtype=None, int? scale_dtype=None, int? per_token_scale_dtype=None) -> Tensor[]",
        page=PAGES + "torch_npu-npu_grouped_matmul.md; int8 by int4, int32 results, "
        "rows that group_list leaves out and chip 950: cann ops-transformer "
        "gmm/grouped_matmul/docs/aclnnGroupedMatmulV5.md",
        chips=(A2, A3, A5, I310P),
        outputs=_outputs,
        rules=(
            single("x", "weight", "bias", "scale", "antiquant_scale", "antiquant_offset", "per_token_scale"),
            that(
                "group_type 0, rows by expert (its default of None is refused by the vendor too)",
                lambda call: call["group_type"] == 0,
                "group_type",
            ),
            one_of("group_list_type", 0, 1),
            one_of("split_item", 2, 3),
            one_of("act_type", 0),
            absent("offset", "activation_input", "activation_quant_scale", "activation_quant_offset", "tuning_config"),
            absent("x_dtype", "weight_dtype", "scale_dtype", "per_token_scale_dtype"),
            that(
                "x [rows, K] and weight [experts, K, N]",
                lambda call: (
                    sole(call, "x").dim() == 2
                    and sole(call, "weight").dim() == 3
                    and sole(call, "x").shape[1] == sole(call, "weight").shape[1]
                ),
                "x",
                "weight",
            ),
            that("x of at least one row", lambda call: sole(call, "x").shape[0] > 0, "x"),
            combination(NAMES, A2_A3, (A2, A3)),
            combination(NAMES, CHIP_950, (A5,)),
            combination(NAMES, "f16/f16/f16?/-/-/-/-/f16", (I310P,)),
            that("x not transposed", lambda call: not transposed(sole(call, "x")), "x"),
            that(
                f"K of x, and the contiguous dimension of weight, below {INNER_LIMIT}",
                _inner,
                "x",
                "weight",
            ),
            *group_list_rules("weight"),
            that(
                "more than one expert where group_list_type is 1",
                lambda call: call["group_list_type"] == 0 or call["group_list"].shape[0] > 1,
                "group_list",
                "group_list_type",
            ),
            shape_of("bias", "[experts, N]", _per_output),
            shape_of("scale", "[experts, N], or [experts, K / 256, N] of int4", _scale),
            shape_of("antiquant_scale", "[experts, N]", _per_output),
            shape_of("antiquant_offset", "[experts, N]", _per_output),
            shape_of("per_token_scale", "[rows]", lambda call: (sole(call, "x").shape[0],)),
            that(
                f"K a multiple of {GROUP} up to {INT4_INPUTS}, weight not transposed and group_list_type 1 for int4 "
                "weights",
                lambda call: (
                    not is_int4(call)
                    or (
                        sole(call, "x").shape[1] % GROUP == 0
                        and 0 < sole(call, "x").shape[1] <= INT4_INPUTS
                        and not transposed(sole(call, "weight"))
                        and call["group_list_type"] == 1
                    )
                ),
                "x",
                "weight",
                "group_list_type",
            ),
            that(
                "N a multiple of 16",
                lambda call: columns(sole(call, "weight")) % 16 == 0,
                "weight",
                chips=(I310P,),
            ),
        ),
        value_rules=(covers(lambda call: call["group_list_type"]),),
        explicit=("split_item", "group_type", "group_list_type", "output_dtype"),
        nz=("weight",),
        note="group_list_type 0 is prefix sums, 1 counts; weights may be transposed views; bf16 bias is not taken, it "
        "must be f32; int4 is packed by eight in int32, with bias = 8 * sum(weight * scale), which is not a bias",
    ),
)
