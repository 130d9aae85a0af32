"""Launches of the routers: the logits, then the choice of experts from them."""

from __future__ import annotations

import torch

from porter.kernels.triton.launch import (
    Arguments,
    Constants,
    Launch,
    NotServed,
    Plan,
    blocks,
    power_of_two,
    rows_of,
    unit_stride,
)

EXPERTS = 1024
"""Experts that are chosen from at once."""
TILE = 16
"""Tokens of a tile of logits, and the least of any side: what a matrix unit multiplies at once."""
EXPERT_TILE = 64
WIDTH_TILE = 128


def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, list[Launch]]:
    x, tokens, width, stride = rows_of(hidden)
    w, experts = unit_stride(weight), weight.shape[0]
    if experts > EXPERTS:
        raise NotServed(f"more than {EXPERTS} experts")
    logits = hidden.new_empty(hidden.shape[0], experts, dtype=torch.float32)
    tile = min(max(power_of_two(experts), TILE), EXPERT_TILE)
    arguments: Arguments = {"hidden": x, "weight": w, "logits": logits, "tokens": tokens, "experts": experts}
    arguments |= {"width": width, "hidden_stride": stride, "weight_stride": w.stride(0)}
    constants: Constants = {"TOKENS": TILE, "EXPERTS": tile, "BLOCK": min(max(power_of_two(width), TILE), WIDTH_TILE)}
    grid = (blocks(tokens, TILE), blocks(experts, tile))
    return logits, [Launch("router_logits", "router_logits", grid, arguments, constants, ("logits",))]


def softmax(programs: int, hidden: torch.Tensor, weight: torch.Tensor, top_k: int, renormalize: bool) -> Plan:
    """The logits in float32, then their rounding, softmax and choice, a token at a time."""
    scores, launches = _logits(hidden, weight)
    tokens, experts = scores.shape
    logits = hidden.new_empty(tokens, experts)
    weights = hidden.new_empty(tokens, top_k)
    indices = hidden.new_empty(tokens, top_k, dtype=torch.int64)
    arguments: Arguments = {"scores": scores, "logits": logits, "weights": weights, "indices": indices}
    arguments |= {"tokens": tokens, "experts": experts}
    constants: Constants = {"TOP_K": top_k, "RENORMALIZE": renormalize, "EXPERTS": power_of_two(experts)}
    constants |= {"PICKS": power_of_two(top_k)}
    grid, writes = (min(tokens, programs), 1), ("logits", "weights", "indices")
    launches.append(Launch("router_softmax", "router_softmax", grid, arguments, constants, writes))
    return Plan(tuple(launches), (logits, weights, indices))


def grouped_sigmoid(
    programs: int,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    num_group: int,
    topk_group: int,
    renormalize: bool,
    routed_scaling_factor: float,
) -> Plan:
    """The logits in float32, which are an output, then the choice of groups and experts, a token at a time."""
    logits, launches = _logits(hidden, weight)
    tokens, experts = logits.shape
    members = experts // num_group
    if top_k > topk_group * members:
        raise NotServed("more picks than experts in the groups kept")
    weights = hidden.new_empty(tokens, top_k, dtype=torch.float32)
    indices = hidden.new_empty(tokens, top_k, dtype=torch.int64)
    arguments: Arguments = {"logits": logits, "bias": unit_stride(bias), "weights": weights, "indices": indices}
    arguments |= {"tokens": tokens, "groups": num_group, "members": members, "factor": float(routed_scaling_factor)}
    constants: Constants = {"TOP_K": top_k, "TOP_GROUPS": topk_group, "RENORMALIZE": renormalize}
    constants |= {"GROUPS": power_of_two(num_group), "MEMBERS": power_of_two(members), "PICKS": power_of_two(top_k)}
    grid, writes = (min(tokens, programs), 1), ("weights", "indices")
    launches.append(Launch("router_grouped_sigmoid", "router_grouped_sigmoid", grid, arguments, constants, writes))
    return Plan(tuple(launches), (logits, weights, indices))
