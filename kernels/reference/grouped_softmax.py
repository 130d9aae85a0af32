"""DeepSeek-V2's router: softmax scores, the groups with the best experts, then the best experts of those."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from porter.kernels.contract import Case, Cost, Op, Tolerance, compute_dtype
from porter.kernels.reference.draw import Draw, spread
from porter.kernels.reference.router import Routing, routing_cost, routing_error, routing_shapes

TOLERANCE = Tolerance(
    "logits are dot products over H, and the softmax carries their absolute error over to relative error of the "
    "weights; both stay in the compute dtype whatever the activations have",
    terms=lambda hidden, weight, *rest: 64.0 * (hidden.shape[-1] + weight.shape[0]),
    roundings=0.0,
)


def within_groups(scores: torch.Tensor, num_group: int, topk_group: int) -> torch.Tensor:
    """scores [T, E] with 0 outside the `topk_group` groups whose largest scores are largest."""
    grouped = scores.view(-1, num_group, scores.shape[-1] // num_group)
    best = torch.topk(grouped.amax(dim=-1), topk_group, dim=-1, sorted=False)[1]
    kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), 0.0).reshape(scores.shape)


def router_grouped_softmax(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    top_k: int,
    num_group: int,
    topk_group: int,
    routed_scaling_factor: float,
) -> Routing:
    """hidden [T, H], weight [E, H] -> (logits [T, E], weights [T, k] descending, indices [T, k] int64).

    The weights are the top k of softmax(logits) within the best groups of E / num_group experts, times
    routed_scaling_factor; they are not divided by their sum. Logits and weights are float32 (float64 for float64).
    Equals transformers' DeepseekV2TopkRouter: "group_limited_greedy", and with one group "greedy".
    """
    dtype = compute_dtype(hidden.dtype)
    logits = torch.nn.functional.linear(hidden.to(dtype), weight.to(dtype))
    scores = within_groups(torch.softmax(logits, dim=-1), num_group, topk_group)
    weights, indices = torch.topk(scores, top_k, dim=-1)
    return logits, weights * routed_scaling_factor, indices


def _error(candidate: Routing, oracle: Routing, *arguments: Any) -> float:
    hidden, weight, _, num_group, topk_group, factor = arguments
    scores = within_groups(torch.softmax(hidden.double() @ weight.double().T, dim=-1), num_group, topk_group)
    return routing_error(candidate, oracle, scores, lambda indices: scores.gather(1, indices) * float(factor))


def _fake(hidden: torch.Tensor, weight: torch.Tensor, top_k: int, *rest: object) -> Routing:
    return routing_shapes(hidden, weight, top_k, compute_dtype(hidden.dtype))


def _cost(*arguments: Any) -> Cost:
    return routing_cost(_fake(*arguments), *arguments)


SHAPES = (  # tokens, hidden size, experts, top_k, groups, groups kept
    (1, 7, 4, 1, 1, 1),
    (5, 64, 16, 3, 4, 2),
    (3, 127, 21, 5, 3, 2),
    (7, 96, 160, 6, 8, 3),
    (4, 33, 64, 6, 1, 1),
    (2, 16, 6, 2, 6, 3),
    (0, 32, 8, 2, 2, 1),
)


def _inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 74)
    wide = Draw(torch.float64 if dtype == torch.float64 else torch.float32, 75)
    for tokens, hidden_size, experts, top_k, groups, kept in SHAPES:
        hidden = draw.normal(tokens, hidden_size)
        for source, name in ((draw, "activation"), (wide, "float32")):
            weight = source.normal(experts, hidden_size, scale=2 * hidden_size**-0.5)
            label = f"T={tokens} H={hidden_size} E={experts} k={top_k} groups={kept}/{groups} {name} weight"
            yield Case(label, (hidden, weight, top_k, groups, kept, 16.0))
    weight = wide.normal(8, 32, scale=0.2)
    yield Case("rows apart", (spread(draw.normal(5, 32)), weight, 2, 4, 2, 1.0))
    yield Case("more picks than experts kept", (draw.normal(5, 32), weight, 3, 8, 2, 1.0))
    yield Case("zeros and 1e-4", (draw.extreme_rows(32)[::2], weight, 2, 1, 1, 2.5))


SCHEMA = (
    "(Tensor hidden, Tensor weight, int top_k, int num_group, int topk_group, float routed_scaling_factor) "
    "-> (Tensor, Tensor, Tensor)"
)

OPS = (Op("router", "grouped_softmax", SCHEMA, router_grouped_softmax, _fake, _inputs, TOLERANCE, _cost, error=_error),)
