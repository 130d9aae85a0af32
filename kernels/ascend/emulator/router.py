"""Choosing experts as the vendor documents it: in float32, equal scores in the order of the experts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from porter.kernels.ascend.catalogue.vendor_op import I310P, Call

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

NORMS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    0: lambda x: x.softmax(dim=-1),
    1: lambda x: 1.0 / (1.0 + torch.exp(-x)),
    2: lambda x: torch.nn.functional.softplus(x).sqrt(),
}


def npu_moe_gating_top_k(call: Call) -> Three:
    """Weights in the dtype of x, experts int32, and the scores in float32 where out_flag is set (undefined else)."""
    scores = NORMS[call["norm_type"]](call["x"].float())
    if call["tid2eid"] is not None:
        experts = call["tid2eid"][call["input_ids"].long()].long()
    else:
        experts = _ordered(_open(call, scores))[:, : call["k"]]
    weights = scores.gather(1, experts)
    if call["norm_type"] != 0:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + call["eps"])
    weights = (weights * call["routed_scaling_factor"]).to(call["x"].dtype)
    return weights, experts.int(), scores if call["out_flag"] else torch.full_like(scores, torch.nan)


def _open(call: Call, scores: torch.Tensor) -> torch.Tensor:
    """scores + bias, -inf outside the k_group groups that are best by their largest (0) or two largest (1)."""
    choice = scores if call["bias"] is None else scores + call["bias"].float()
    if call["group_count"] == 1:
        return choice
    grouped = choice.unflatten(1, (call["group_count"], -1))
    best = grouped.sort(dim=-1, descending=True)[0][..., : 1 + call["group_select_mode"]].sum(dim=-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _ordered(best)[:, : call["k_group"]], True)
    masked: torch.Tensor = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    return masked


def _ordered(values: torch.Tensor) -> torch.Tensor:
    return torch.argsort(values, dim=-1, descending=True, stable=True)


def npu_moe_gating_top_k_softmax(call: Call) -> Three:
    """The k largest of the softmax, not divided by their sum; their experts; row numbers column by column."""
    x, k = call["x"], call["k"]
    scores = x.float().softmax(dim=-1)
    experts = _ordered(scores)[:, :k]
    rows = torch.arange(x.shape[0] * k, dtype=torch.int32).view(k, x.shape[0]).T.contiguous()
    return scores.gather(1, experts).to(x.dtype), experts.int(), rows * (call.chip != I310P)


def npu_moe_gating_top_k_softmax_v2(call: Call) -> Three:
    """As the first version where renorm is 0; the softmax of the k largest logits where it is 1."""
    wide, k = call["x"].float(), call["k"]
    scores = wide.softmax(dim=-1)
    experts = _ordered(wide if call["renorm"] else scores)[:, :k]
    weights = wide.gather(1, experts).softmax(dim=-1) if call["renorm"] else scores.gather(1, experts)
    return weights.to(call["x"].dtype), experts.int(), scores if call["output_softmax"] else wide.new_empty(0)


SEMANTICS = {
    "npu_moe_gating_top_k": npu_moe_gating_top_k,
    "npu_moe_gating_top_k_softmax": npu_moe_gating_top_k_softmax,
    "npu_moe_gating_top_k_softmax_v2": npu_moe_gating_top_k_softmax_v2,
}
