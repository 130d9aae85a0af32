"""Choosing experts from router logits."""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.catalogue.rules import absent, dtypes, one_of, rank, size, that
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, I310P, PAGES, Call, VendorOp

ACLNN = "cann ops-transformer moe/moe_gating_top_k/docs/"
LOGITS = "f16 bf16 f32"
MOST_EXPERTS = 2048


def _chosen(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    x = call["x"]
    shape = (*x.shape[:-1], call["k"])
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32)


def _gating(call: Call) -> Any:
    return *_chosen(call), call["x"].new_empty(call["x"].shape, dtype=torch.float32)


def _softmax(call: Call) -> Any:
    chosen = _chosen(call)
    return *chosen, torch.empty_like(chosen[1])


def _softmax_v2(call: Call) -> Any:
    shape = call["x"].shape if call["output_softmax"] else (0,)
    return *_chosen(call), call["x"].new_empty(shape, dtype=torch.float32)


def _aligned_experts(call: Call) -> int:
    """Experts of all groups with each group's rounded up to 32."""
    group = call["x"].shape[-1] // call["group_count"]
    return int(-(-group // 32) * 32 * call["group_count"])


def _hash(call: Call) -> bool:
    ids, table = call["input_ids"], call["tid2eid"]
    if ids is None or table is None:
        return ids is None and table is None
    shapes = ids.dim() == 1 and table.dim() == 2 and ids.shape[0] == call["x"].shape[0]
    return bool(shapes and table.shape[1] == call["k"] <= 64 and call["k_group"] == call["group_count"])


_AT_LEAST_ONE = size("x", 0, "at least 1", lambda n: n >= 1)
_SOFTMAX_RULES = (
    dtypes("x", LOGITS),
    rank("x", 2),
    _AT_LEAST_ONE,
    absent("finished"),
    that(
        "k from 1 to the experts and to 1024",
        lambda call: 1 <= call["k"] <= min(call["x"].shape[-1], 1024),
        "x",
        "k",
    ),
)

OPS = (
    VendorOp(
        name="npu_moe_gating_top_k",
        schema="(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, Tensor? tid2eid=None, int k_group=1, "
        "int group_count=1, int group_select_mode=0, int renorm=0, int norm_type=0, bool out_flag=False, "
        "float routed_scaling_factor=1., float eps=1e-20) -> (Tensor, Tensor, Tensor)",
        page=f"{PAGES}torch_npu-npu_moe_gating_top_k.md; norm_type 2 and the table of token ids: {ACLNN}"
        "aclnnMoeGatingTopKV2.md",
        chips=(A2, A3, A5),
        outputs=_gating,
        rules=(
            dtypes("x bias", "f16/f16 bf16/bf16 f32/f32"),
            rank("x", 2),
            _AT_LEAST_ONE,
            size("x", 1, f"at most {MOST_EXPERTS}", lambda n: n <= MOST_EXPERTS),
            that(
                "bias of 1 dimension, one for each expert",
                lambda call: call["bias"] is None or call["bias"].shape == call["x"].shape[1:],
                "x",
                "bias",
            ),
            that(
                "group_count to divide the experts into groups of more than 2, at most 2048 when each is rounded up "
                "to 32",
                lambda call: (
                    call["group_count"] > 0
                    and call["x"].shape[1] % call["group_count"] == 0
                    and call["x"].shape[1] // call["group_count"] > 2
                    and _aligned_experts(call) <= MOST_EXPERTS
                ),
                "x",
                "group_count",
            ),
            that(
                "k_group from 1 to group_count",
                lambda call: 1 <= call["k_group"] <= call["group_count"],
                "k_group",
                "group_count",
            ),
            that(
                "k from 1 to the experts of k_group groups",
                lambda call: 1 <= call["k"] <= call["x"].shape[1] // call["group_count"] * call["k_group"],
                "x",
                "k",
                "k_group",
                "group_count",
            ),
            one_of("group_select_mode", 0, 1),
            one_of("renorm", 0),
            one_of("norm_type", 0, 1, 2),
            dtypes("input_ids", "i32 i64"),
            dtypes("tid2eid", "i32 i64"),
            that(
                "input_ids [rows] and tid2eid [token ids, k] together, k to 64 and k_group to be group_count",
                _hash,
                "input_ids",
                "tid2eid",
                "k",
                "k_group",
                "group_count",
            ),
        ),
        explicit=(
            "k_group",
            "group_count",
            "group_select_mode",
            "renorm",
            "norm_type",
            "out_flag",
            "routed_scaling_factor",
            "eps",
        ),
        note="sigmoid (norm_type 1) and sqrt(softplus) (2) divide the weights by their sum + eps, softmax (0) does not",
    ),
    VendorOp(
        name="npu_moe_gating_top_k_softmax",
        schema="(Tensor x, Tensor? finished=None, int k=1) -> (Tensor, Tensor, Tensor)",
        page=f"{PAGES}torch_npu-npu_moe_gating_top_k_softmax.md; chips 950 and 310P: cann ops-transformer "
        "moe/moe_gating_top_k_softmax/docs/aclnnMoeGatingTopKSoftmax.md; 310P's 1024 rows: vllm-ascend PR 11391",
        chips=(A2, A3, A5, I310P),
        outputs=_softmax,
        rules=(
            *_SOFTMAX_RULES,
            size("x", 1, f"at most {MOST_EXPERTS}", lambda n: n <= MOST_EXPERTS, chips=(A5,)),
            dtypes("x", "f16", chips=(I310P,)),
            size("x", 1, "a multiple of 16 to 256", lambda n: n % 16 == 0 and n <= 256, chips=(I310P,)),
            size("x", 0, "at most 1024, above which the operator overflows", lambda n: n <= 1024, chips=(I310P,)),
        ),
        explicit=("k",),
        note="the weights are not divided by their sum; the third result counts rows column by column (0 on 310P)",
    ),
    VendorOp(
        name="npu_moe_gating_top_k_softmax_v2",
        schema="(Tensor x, *, int k=1, Tensor? finished=None, int? renorm=0, bool? output_softmax=False) -> "
        "(Tensor, Tensor, Tensor)",
        page="docstring of torch_npu.npu_moe_gating_top_k_softmax_v2 in torch_npu 2.13",
        chips=(A2, A3),
        outputs=_softmax_v2,
        rules=(
            *_SOFTMAX_RULES,
            one_of("renorm", 0, 1),
            that(
                "output_softmax False where renorm is 1",
                lambda call: not (call["renorm"] and call["output_softmax"]),
                "renorm",
                "output_softmax",
            ),
        ),
        explicit=("k", "renorm", "output_softmax"),
        note="renorm 1 takes the softmax of the k largest logits: the weights divided by their sum",
    ),
)
