"""Sending tokens to the ranks of their experts, and the results back."""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.catalogue.expert_parallel_rules import (
    ASSIST,
    EXPERT_IDS,
    count_values,
    local_experts,
    most_rows,
    shared_rules,
)
from porter.kernels.ascend.catalogue.rules import absent, dtypes, one_of, same_shape, that
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, PAGES, Call, VendorOp


def _dispatch(call: Call) -> Any:
    x, rows = call["x"], most_rows(call)
    quantized = call["quant_mode"] == 2
    return (
        x.new_empty((rows, x.shape[1]), dtype=torch.int8 if quantized else x.dtype),
        x.new_empty(rows, dtype=torch.float32),
        x.new_empty(max(call["expert_ids"].numel(), rows * ASSIST), dtype=torch.int32),
        x.new_empty(local_experts(call), dtype=torch.int64),
        x.new_empty(count_values(call), dtype=torch.int32),
        x.new_empty(call["tp_world_size"], dtype=torch.int32),
        x.new_empty(rows if call["expert_scales"] is not None else 0, dtype=torch.float32),
    )


def _combine(call: Call) -> Any:
    return call["expand_x"].new_empty((call["expert_ids"].shape[0], call["expand_x"].shape[1]))


OPS = (
    VendorOp(
        name="npu_moe_distribute_dispatch_v2",
        schema="(Tensor x, Tensor expert_ids, str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num, *, "
        "Tensor? scales=None, Tensor? x_active_mask=None, Tensor? expert_scales=None, Tensor? elastic_info=None, "
        'Tensor? performance_info=None, str group_tp="", int tp_world_size=0, int tp_rank_id=0, '
        "int expert_shard_type=0, int shared_expert_num=1, int shared_expert_rank_num=0, int quant_mode=0, "
        'int global_bs=0, int expert_token_nums_type=1, str comm_alg="", int zero_expert_num=0, '
        "int copy_expert_num=0, int const_expert_num=0, int? y_dtype=None, int? x_dtype=None, "
        "int? scales_dtype=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        page=PAGES + "torch_npu-npu_moe_distribute_dispatch_v2.md",
        chips=(A2, A3),
        outputs=_dispatch,
        rules=(
            *shared_rules("x"),
            that(
                "x and expert_ids of as many rows",
                lambda c: c["x"].shape[0] == c["expert_ids"].shape[0],
                "x",
                "expert_ids",
            ),
            one_of("quant_mode", 0, 2),
            one_of("expert_token_nums_type", 0, 1),
            dtypes("expert_scales", "f32"),
            that(
                "expert_scales [tokens, k]",
                lambda c: c["expert_scales"] is not None and c["expert_scales"].shape == c["expert_ids"].shape,
                "expert_scales",
                "expert_ids",
                chips=(A2,),
            ),
            absent("expert_scales", why="this chip takes with comm_alg 'hierarchy' alone", chips=(A3,)),
            absent("scales", "y_dtype", "x_dtype", "scales_dtype"),
        ),
        value_rules=(EXPERT_IDS,),
        explicit=("quant_mode", "global_bs", "expert_token_nums_type", "comm_alg"),
        note="expert_token_nums_type 1 gives counts, 0 prefix sums; rows past their sum are undefined; results 2, 4 "
        "and 6 are for npu_moe_distribute_combine_v2 alone",
    ),
    VendorOp(
        name="npu_moe_distribute_combine_v2",
        schema="(Tensor expand_x, Tensor expert_ids, Tensor assist_info_for_combine, Tensor ep_send_counts, "
        "Tensor expert_scales, str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num, *, "
        "Tensor? tp_send_counts=None, Tensor? x_active_mask=None, Tensor? expand_scales=None, "
        "Tensor? shared_expert_x=None, Tensor? elastic_info=None, Tensor? ori_x=None, "
        "Tensor? const_expert_alpha_1=None, Tensor? const_expert_alpha_2=None, Tensor? const_expert_v=None, "
        'Tensor? performance_info=None, str group_tp="", int tp_world_size=0, int tp_rank_id=0, '
        "int expert_shard_type=0, int shared_expert_num=1, int shared_expert_rank_num=0, int global_bs=0, "
        'int comm_quant_mode=0, str comm_alg="", int zero_expert_num=0, int copy_expert_num=0, '
        "int const_expert_num=0) -> Tensor",
        page=PAGES + "torch_npu-npu_moe_distribute_combine_v2.md",
        chips=(A2, A3),
        outputs=_combine,
        rules=(
            *shared_rules("expand_x"),
            dtypes("assist_info_for_combine ep_send_counts expert_scales", "i32/i32/f32"),
            same_shape("expert_ids", "expert_scales"),
            that(
                "assist_info_for_combine and ep_send_counts of the sizes that npu_moe_distribute_dispatch_v2 gives",
                lambda c: (
                    tuple(c["assist_info_for_combine"].shape) == (max(c["expert_ids"].numel(), most_rows(c) * ASSIST),)
                    and tuple(c["ep_send_counts"].shape) == (count_values(c),)
                ),
                "assist_info_for_combine",
                "ep_send_counts",
            ),
            that(
                "expand_x of as many rows as a rank may receive",
                lambda c: c["expand_x"].shape[0] == most_rows(c),
                "expand_x",
            ),
            dtypes("expand_scales", "f32"),
            that(
                "expand_scales, one for each row of expand_x",
                lambda c: c["expand_scales"] is not None and c["expand_scales"].shape == c["expand_x"].shape[:1],
                "expand_scales",
                "expand_x",
                chips=(A2,),
            ),
            absent("tp_send_counts", "shared_expert_x", "ori_x"),
            absent("const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v"),
            one_of("comm_quant_mode", 0),
        ),
        value_rules=(EXPERT_IDS,),
        explicit=("global_bs", "comm_quant_mode", "comm_alg"),
        note="expert_scales, the router's weights, are applied here, in float32; arguments of both must agree",
    ),
)
