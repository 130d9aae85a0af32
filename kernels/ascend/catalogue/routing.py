"""Sorting tokens by expert, and adding up what the experts made of them."""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.catalogue.rules import absent, dtypes, one_of, rank, same_shape, size, that
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, I310P, PAGES, Call, Rule, VendorOp

ACLNN = "cann ops-transformer moe/"
MOST_EXPERTS = 10240


def active_range(call: Call) -> tuple[int, int]:
    """First and one past the last of the experts whose tokens npu_moe_init_routing_v2 sorts."""
    bounds = call["active_expert_range"]
    return (int(bounds[0]), int(bounds[1])) if bounds else (0, int(call["expert_num"]))


def _init_v2(call: Call) -> Any:
    x, rows, (first, last) = call["x"], call["expert_idx"].numel(), active_range(call)
    kept = rows if call["active_num"] <= 0 else min(call["active_num"], rows)
    dtype = x.dtype if call["quant_mode"] == -1 else torch.int8
    return (
        x.new_empty((kept, x.shape[1]), dtype=dtype),
        x.new_empty(rows, dtype=torch.int32),
        x.new_empty(last - first, dtype=torch.int64),
        x.new_empty(kept, dtype=torch.float32),
    )


def _init(call: Call) -> Any:
    x, rows = call["x"], call["expert_idx"].numel()
    kept = min(call["active_num"], x.shape[0]) * call["expert_idx"].shape[1]
    return x.new_empty((kept, x.shape[1])), *(x.new_empty(rows, dtype=torch.int32) for _ in range(2))


def _finalize(call: Call) -> Any:
    rows, scales = call["expanded_permuted_rows"], call["scales"]
    tokens = call["expanded_src_to_dst_row"].shape[0] // call["k"] if scales is None else scales.shape[0]
    return rows.new_empty((tokens, rows.shape[-1]))


def within(name: str, low: int, high: Any, says: str) -> Rule:
    """A rule on values: all of `name` are from `low` to below `high(call)`."""

    def holds(call: Call) -> bool:
        values = call[name]
        return values is None or not values.numel() or low <= int(values.min()) <= int(values.max()) < high(call)

    return that(says, holds, name)


def _rows_of(call: Call) -> int:
    return int(call["expanded_permuted_rows"].shape[:-1].numel())


_NOT_EMPTY = size("x", 0, "at least 1", lambda n: n >= 1)
_TOP_K = that(
    "expert_idx [rows of x, k]",
    lambda call: call["expert_idx"].dim() == 2 and call["expert_idx"].shape[0] == call["x"].shape[0],
    "x",
    "expert_idx",
)

OPS = (
    VendorOp(
        name="npu_moe_init_routing_v2",
        schema="(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, int active_num=-1, "
        "int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, int expert_tokens_num_type=0, "
        "bool expert_tokens_num_flag=False, int quant_mode=-1, int[2] active_expert_range=[], int row_idx_type=0, "
        "int? x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)",
        page=f"{PAGES}torch_npu-npu_moe_init_routing_v2.md; expert -1 and chip 950: {ACLNN}moe_init_routing_v3/docs/"
        "aclnnMoeInitRoutingV3.md",
        chips=(A2, A3, A5),
        outputs=_init_v2,
        rules=(
            dtypes("x", "f16 bf16 f32"),
            rank("x", 2),
            dtypes("expert_idx", "i32"),
            _TOP_K,
            _NOT_EMPTY,
            one_of("drop_pad_mode", 0),
            one_of("quant_mode", -1, 1),
            absent("scale", "offset", "x_dtype"),
            one_of("expert_tokens_num_type", 0, 1),
            one_of("expert_tokens_num_flag", True),
            one_of("row_idx_type", 0, 1),
            that(
                f"expert_num from 1 to {MOST_EXPERTS}",
                lambda call: 1 <= call["expert_num"] <= MOST_EXPERTS,
                "expert_num",
            ),
            that(
                "active_expert_range to be [first, last) within expert_num",
                lambda call: 0 <= active_range(call)[0] < active_range(call)[1] <= call["expert_num"],
                "active_expert_range",
                "expert_num",
            ),
            that(
                "active_num to be -1, 0 or rows * k",
                lambda call: call["active_num"] in (-1, 0, call["expert_idx"].numel()),
                "active_num",
                "expert_idx",
            ),
        ),
        value_rules=(
            within("expert_idx", -1, lambda call: call["expert_num"], "expert_idx from -1 (none) to below expert_num"),
        ),
        explicit=(
            "active_num",
            "expert_num",
            "drop_pad_mode",
            "expert_tokens_num_type",
            "expert_tokens_num_flag",
            "quant_mode",
            "active_expert_range",
            "row_idx_type",
        ),
        note="expert_tokens_num_type 0 gives prefix sums, 1 counts; rows past those of active experts are undefined; "
        "without active_expert_range the vendor's wrapper keeps the expert_num of its first call",
    ),
    VendorOp(
        name="npu_moe_init_routing",
        schema="(Tensor x, Tensor row_idx, Tensor expert_idx, int active_num) -> (Tensor, Tensor, Tensor)",
        page=PAGES + "torch_npu-npu_moe_init_routing.md",
        chips=(A2,),
        outputs=_init,
        rules=(
            dtypes("x", "f16 bf16 f32"),
            rank("x", 2),
            _NOT_EMPTY,
            dtypes("row_idx expert_idx", "i32/i32"),
            _TOP_K,
            same_shape("row_idx", "expert_idx"),
            that("active_num of at least 1", lambda call: call["active_num"] >= 1, "active_num"),
            that("x of fewer than 2^24 values", lambda call: call["x"].numel() < 1 << 24, "x"),
        ),
        value_rules=(
            that(
                "row_idx to count the rows column by column: row + column * rows, as npu_moe_gating_top_k_softmax does",
                lambda call: torch.equal(
                    call["row_idx"].cpu().long(), torch.arange(call["row_idx"].numel()).view(call["row_idx"].T.shape).T
                ),
                "row_idx",
            ),
        ),
        note="the second result lists rows column by column: npu_moe_finalize_routing with drop_pad_mode 0",
    ),
    VendorOp(
        name="npu_moe_finalize_routing",
        schema="(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, Tensor? bias, Tensor? scales, "
        "Tensor expanded_src_to_dst_row, Tensor? export_for_source_row, int? drop_pad_mode=0, int? k=1) -> Tensor",
        page=f"{PAGES}torch_npu-npu_moe_finalize_routing.md; float32 scales of bfloat16 rows, and chips: {ACLNN}"
        "moe_finalize_routing_v2/docs/aclnnMoeFinalizeRoutingV2.md",
        chips=(A2, A3, A5, I310P),
        outputs=_finalize,
        rules=(
            dtypes("expanded_permuted_rows scales", "f16/f16 bf16/bf16 f32/f32 bf16/f32", (A2, A3)),
            dtypes("expanded_permuted_rows scales", "f16/f16 bf16/bf16 f32/f32 bf16/f32 f16/f32", (A5,)),
            dtypes("expanded_permuted_rows scales", "f16/f16 f32/f32", (I310P,)),
            dtypes("expanded_src_to_dst_row", "i32"),
            one_of("drop_pad_mode", 0, 1, 2, 3, chips=(A2, A3, A5)),
            one_of("drop_pad_mode", 2, chips=(I310P,)),
            that(
                "expanded_permuted_rows [rows, H] where drop_pad_mode is 0 or 2, [experts, capacity, H] where 1 or 3",
                lambda call: call["expanded_permuted_rows"].dim() == (3 if call["drop_pad_mode"] in (1, 3) else 2),
                "expanded_permuted_rows",
                "drop_pad_mode",
            ),
            rank("expanded_src_to_dst_row", 1),
            rank("scales", 2),
            that(
                "scales [tokens, k] of as many values as expanded_src_to_dst_row has, and at least one",
                lambda call: (
                    0
                    < call["expanded_src_to_dst_row"].numel()
                    == (call["expanded_src_to_dst_row"] if call["scales"] is None else call["scales"]).numel()
                ),
                "scales",
                "expanded_src_to_dst_row",
            ),
            one_of("k", 1),
            absent("skip1", "skip2", "bias", "export_for_source_row"),
            size("expanded_permuted_rows", -1, "a multiple of 32", lambda n: n % 32 == 0, chips=(I310P,)),
        ),
        value_rules=(
            that(
                "expanded_src_to_dst_row from 0 to below the rows (-1, none, only where drop_pad_mode is 1 or 3)",
                lambda call: (
                    (-1 if call["drop_pad_mode"] in (1, 3) else 0)
                    <= int(call["expanded_src_to_dst_row"].min())
                    <= int(call["expanded_src_to_dst_row"].max())
                    < _rows_of(call)
                ),
                "expanded_src_to_dst_row",
                "drop_pad_mode",
            ),
        ),
        explicit=("drop_pad_mode",),
        note="drop_pad_mode 0 and 1 read the index column by column, 2 and 3 row by row, as init_routing_v2 writes it",
    ),
)
