"""Routers by torch_npu. Logits are float32 products, as upstream computes them, and the operators take them so: in
bfloat16 their bias reorders experts.

Weights of the router are best stored in float32, which spares their conversion in every call.
"""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.dry_run import Kernel

Routing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

SOFTMAX, SIGMOID, SQRT_SOFTPLUS = 0, 1, 2
"""norm_type of npu_moe_gating_top_k."""
LARGEST, TWO_LARGEST = 0, 1
"""group_select_mode: by what of its scores a group is judged."""
SUM_FLOOR = 1e-20


def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(hidden.float(), weight.float())


def router_softmax(
    torch_npu: Any, hidden: torch.Tensor, weight: torch.Tensor, top_k: int, renormalize: bool
) -> Routing:
    """npu_moe_gating_top_k_softmax, which does not divide the weights by their sum: done here where asked for."""
    logits = _logits(hidden, weight)
    weights, experts, _ = torch_npu.npu_moe_gating_top_k_softmax(logits, None, k=top_k)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return logits.to(hidden.dtype), weights.to(hidden.dtype), experts.long()


def _gating(torch_npu: Any, logits: torch.Tensor, top_k: int, norm_type: int, factor: float, **others: Any) -> Any:
    arguments = {"k_group": 1, "group_count": 1, "group_select_mode": LARGEST, "out_flag": False, **others}
    return torch_npu.npu_moe_gating_top_k(
        logits, top_k, renorm=0, norm_type=norm_type, routed_scaling_factor=float(factor), eps=SUM_FLOOR, **arguments
    )


def router_grouped_sigmoid(
    torch_npu: Any,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    num_group: int,
    topk_group: int,
    renormalize: bool,
    routed_scaling_factor: float,
) -> Routing:
    """npu_moe_gating_top_k with sigmoid, which always divides the weights by their sum; where they are not to be, they
    are picked from its scores."""
    logits = _logits(hidden, weight)
    weights, experts, scores = _gating(
        torch_npu,
        logits,
        top_k,
        SIGMOID,
        routed_scaling_factor,
        bias=bias.float(),
        k_group=topk_group,
        group_count=num_group,
        group_select_mode=TWO_LARGEST,
        out_flag=not renormalize,
    )
    indices = experts.long()
    if not renormalize:
        weights = scores.gather(1, indices) * routed_scaling_factor
    return logits, weights, indices


def router_grouped_softmax(
    torch_npu: Any,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    top_k: int,
    num_group: int,
    topk_group: int,
    routed_scaling_factor: float,
) -> Routing:
    """npu_moe_gating_top_k with softmax, whose weights stay as they are."""
    logits = _logits(hidden, weight)
    weights, experts, _ = _gating(
        torch_npu, logits, top_k, SOFTMAX, routed_scaling_factor, k_group=topk_group, group_count=num_group
    )
    return logits, weights, experts.long()


def router_sqrtsoftplus(
    torch_npu: Any,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    routed_scaling_factor: float,
) -> Routing:
    """npu_moe_gating_top_k with sqrt(softplus)."""
    logits = _logits(hidden, weight)
    weights, experts, _ = _gating(torch_npu, logits, top_k, SQRT_SOFTPLUS, routed_scaling_factor, bias=bias.float())
    return logits, weights, experts.long()


def router_hash(
    torch_npu: Any,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    input_ids: torch.Tensor,
    routed_scaling_factor: float,
) -> Routing:
    """npu_moe_gating_top_k with sqrt(softplus) and the experts that the table lists for the token ids."""
    logits = _logits(hidden, weight)
    weights, experts, _ = _gating(
        torch_npu,
        logits,
        table.shape[1],
        SQRT_SOFTPLUS,
        routed_scaling_factor,
        input_ids=input_ids,
        tid2eid=table,
    )
    return logits, weights, experts.long()


KERNELS: dict[tuple[str, str], Kernel] = {
    ("router", "softmax"): router_softmax,
    ("router", "grouped_sigmoid"): router_grouped_sigmoid,
    ("router", "grouped_softmax"): router_grouped_softmax,
    ("router", "sqrtsoftplus"): router_sqrtsoftplus,
    ("router", "hash"): router_hash,
}
