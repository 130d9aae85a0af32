"""Faults in routers and experts."""

from __future__ import annotations

from benchmarks.ascend_faults.fault import Fault, Found, Place, Refused, kernel, modeling
from benchmarks.ascend_faults.norms_and_activations import V3

MOE = Place("tiny-qwen3-moe")
V3_W8A8 = Place("tiny-deepseek-v3", "w8a8")
SECOND = r"^model\.layers\.1(\.|$)"
GATE = r"layers\.\d\.mlp\.gate$"
EXPERTS = r"layers\.\d\.mlp\.experts$"
END_OF_STANDARD = (
    ", counts, hidden.dtype)\n    return add_up(torch_npu, out, index, top_k_weights)\n\n\ndef experts_w8a16"
)

FAULTS = (
    Fault(
        "not-renormalised",
        "npu_moe_gating_top_k_softmax does not divide the weights by their sum",
        MOE,
        (
            kernel(
                "router",
                "if renormalize:\n        weights = weights / weights",
                "if False:\n        weights = weights / weights",
            ),
        ),
        Found(GATE, ("router-renormalisation",)),
        SECOND,
    ),
    Fault(
        "renormalised-twice",
        "npu_moe_gating_top_k's sigmoid divides by the sum itself; again, and the factor is lost",
        V3,
        (
            kernel(
                "router",
                "    if not renormalize:\n        weights = scores.gather(1, indices) * routed_scaling_factor\n",
                "    weights = weights / weights.sum(-1, keepdim=True)\n",
            ),
        ),
        Found(GATE, ("router-scale",)),
        SECOND,
    ),
    Fault(
        "routed-scaling-factor-missing",
        "routed_scaling_factor not passed on (vllm-ascend #9036)",
        V3,
        (kernel("router", "routed_scaling_factor=float(factor)", "routed_scaling_factor=1.0"),),
        Found(GATE, ("router-scale",)),
        SECOND,
    ),
    Fault(
        "routed-scaling-factor-left-out",
        "its default is 1.0",
        V3,
        (kernel("router", " routed_scaling_factor=float(factor),", ""),),
        Refused(("npu_moe_gating_top_k", "routed_scaling_factor", "left out")),
    ),
    Fault(
        "bias-narrow",
        "the correction bias in bfloat16 beside float32 scores",
        V3,
        (kernel("router", "bias=bias.float(),\n        k_group", "bias=bias.bfloat16(),\n        k_group"),),
        Refused(("npu_moe_gating_top_k", "bias")),
    ),
    Fault(
        "router-narrow",
        "scores and bias in bfloat16, which reorder experts (sglang #39351)",
        V3,
        (
            kernel("router", "hidden.float(), weight.float())", "hidden, weight.to(hidden.dtype))"),
            kernel("router", "bias=bias.float(),\n        k_group", "bias=bias.bfloat16(),\n        k_group"),
        ),
        Found(GATE, ("router-dtype",)),
        SECOND,
    ),
    Fault(
        "scores-by-softmax",
        "norm_type is 0, softmax, unless it is given",
        V3,
        (kernel("router", "SIGMOID,\n        routed", "SOFTMAX,\n        routed"),),
        Found(GATE, ("activation",)),
        SECOND,
    ),
    Fault(
        "groups-by-their-largest",
        "group_select_mode 1 adds the two largest of a group",
        V3,
        (kernel("router", "group_select_mode=TWO_LARGEST", "group_select_mode=LARGEST"),),
        Found(GATE, ("router-groups",)),
        SECOND,
    ),
    Fault(
        "groups-exchanged",
        "k_group is how many groups are taken, group_count how many there are",
        V3,
        (
            kernel(
                "router",
                "k_group=topk_group,\n        group_count=num_group,\n        group_select",
                "k_group=num_group,\n        group_count=topk_group,\n        group_select",
            ),
        ),
        Refused(("npu_moe_gating_top_k", "k_group")),
    ),
    Fault(
        "prefix-sums-for-counts",
        "expert_tokens_num_type 0 gives prefix sums, group_list_type 1 reads counts (vllm-ascend #5025)",
        MOE,
        (kernel("experts", "expert_tokens_num_type=COUNTS", "expert_tokens_num_type=0"),),
        Refused(("group_list",)),
    ),
    Fault(
        "counts-for-prefix-sums",
        "group_list_type 0, the default, reads prefix sums",
        MOE,
        (
            kernel(
                "experts", "group_list_type=COUNTS,\n        output_dtype", "group_list_type=0,\n        output_dtype"
            ),
        ),
        Refused(("npu_grouped_matmul", "group_list")),
    ),
    Fault(
        "group-list-type-left-out",
        "the same, left out",
        MOE,
        (kernel("experts", "        group_list_type=COUNTS,\n        output_dtype", "        output_dtype"),),
        Refused(("npu_grouped_matmul", "group_list_type", "left out")),
    ),
    Fault(
        "grouped-output-dtype-left-out",
        "output_dtype of the grouped product",
        MOE,
        (kernel("experts", "        output_dtype=dtype,\n", ""),),
        Refused(("npu_grouped_matmul", "output_dtype", "left out")),
    ),
    Fault(
        "expert-weight-not-transposed",
        "npu_grouped_matmul takes [E, K, N]",
        MOE,
        (
            kernel(
                "experts",
                "wide = product(torch_npu, rows, gate_up.transpose(1, 2)",
                "wide = product(torch_npu, rows, gate_up",
            ),
        ),
        Found(EXPERTS, ("weight-transposed",)),
        r"^model\.layers\.0(\.|$)",
    ),
    Fault(
        "expert-weight-not-square",
        "the same where the sizes tell",
        MOE,
        (
            kernel(
                "experts",
                "down.transpose(1, 2)" + END_OF_STANDARD,
                "down" + END_OF_STANDARD,
            ),
        ),
        Refused(("npu_grouped_matmul", "weight")),
    ),
    Fault(
        "row-index-scattered",
        "row_idx_type 1 says where rows came from, 0 where they went",
        MOE,
        (kernel("experts", "row_idx_type=0", "row_idx_type=1"),),
        Found(EXPERTS, ("expert-permutation",)),
        SECOND,
    ),
    Fault(
        "row-index-by-columns",
        "drop_pad_mode 0 of npu_moe_finalize_routing reads the index by columns, 2 by rows",
        MOE,
        (
            kernel("experts", "wide.unsqueeze(1)", "wide"),
            kernel("experts", "drop_pad_mode=ROW_BY_ROW_WITH_NONE", "drop_pad_mode=0"),
        ),
        Found(EXPERTS, ("expert-permutation",)),
        SECOND,
    ),
    Fault(
        "shared-expert-missing",
        "the shared expert's output not added",
        V3,
        (modeling("hidden_states = hidden_states + self.shared_experts(residuals)", "self.shared_experts(residuals)"),),
        Found(r"layers\.1\.mlp$", ("shared-expert",)),
        SECOND,
    ),
    Fault(
        "gate-on-the-right",
        "activate_left False, the default of npu_dequant_swiglu_quant",
        V3_W8A8,
        (kernel("experts", "activate_left=True", "activate_left=False"),),
        Found(EXPERTS, ("gate-up-swapped",)),
        SECOND,
    ),
    Fault(
        "activate-left-left-out",
        "the same, left out",
        V3_W8A8,
        (kernel("experts", "        activate_left=True,\n", ""),),
        Refused(("npu_dequant_swiglu_quant", "activate_left", "left out")),
    ),
    Fault(
        "static-quantization-by-default",
        "quant_mode 0, static, is the default of npu_dequant_swiglu_quant",
        V3_W8A8,
        (kernel("experts", "quant_mode=1,\n        **clamp", "quant_mode=0,\n        **clamp"),),
        Refused(("npu_dequant_swiglu_quant", "quant_mode")),
    ),
    Fault(
        "expert-scale-of-another-dtype",
        "bfloat16 outputs take bfloat16 scales (vllm-ascend #2925)",
        V3_W8A8,
        (
            kernel(
                "experts",
                "down_scale.to(torch.float32 if hidden.dtype == torch.float16 else torch.bfloat16)",
                "down_scale.float()",
            ),
        ),
        Refused(("npu_grouped_matmul", "scale")),
    ),
)
