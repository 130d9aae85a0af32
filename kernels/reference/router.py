"""Which experts each token goes to, and with what weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from porter.kernels.contract import Case, Cost, Op, Tolerance, compute_dtype, moved_bytes, row_error
from porter.kernels.reference.draw import Draw, spread

Routing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

SOFTMAX_TOLERANCE = Tolerance(
    "logits are dot products over H, and the softmax carries their absolute error over to relative error of the "
    "weights; logits and weights are rounded once to the output dtype",
    terms=lambda hidden, weight, *rest: 64.0 * (hidden.shape[-1] + weight.shape[0]),
)
SIGMOID_TOLERANCE = Tolerance(
    "as softmax routing, but logits and weights stay in the compute dtype whatever the activations have",
    terms=lambda hidden, weight, *rest: 64.0 * (hidden.shape[-1] + 16),
    roundings=0.0,
)


def router_softmax(hidden: torch.Tensor, weight: torch.Tensor, top_k: int, renormalize: bool) -> Routing:
    """hidden [T, H], weight [E, H] -> (logits [T, E], weights [T, k] descending, indices [T, k] int64).

    The weights are the top k of softmax(logits), divided by their sum if `renormalize`. Logits and weights have the
    dtype of `hidden`. Equals transformers' Qwen3MoeTopKRouter, with the logits not rounded before the softmax.
    """
    dtype = compute_dtype(hidden.dtype)
    logits = torch.nn.functional.linear(hidden.to(dtype), weight.to(dtype))
    weights, indices = torch.topk(torch.softmax(logits, dim=-1), top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return logits.to(hidden.dtype), weights.to(hidden.dtype), indices


def group_limited(choice: torch.Tensor, num_group: int, topk_group: int) -> torch.Tensor:
    """choice [T, E] with -inf outside the `topk_group` groups whose two best entries have the largest sums."""
    grouped = choice.view(-1, num_group, choice.shape[-1] // num_group)
    best = torch.topk(grouped.topk(2, dim=-1)[0].sum(dim=-1), topk_group, dim=-1, sorted=False)[1]
    kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, best, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).reshape(choice.shape)


def router_grouped_sigmoid(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    num_group: int,
    topk_group: int,
    renormalize: bool,
    routed_scaling_factor: float,
) -> Routing:
    """hidden [T, H], weight [E, H], bias [E] -> (logits [T, E], weights [T, k], indices [T, k] int64).

    The bias takes part in choosing only; groups of E / num_group >= 2 experts. Logits and weights are float32 (float64
    for float64). Equals transformers' DeepseekV3TopkRouter.
    """
    dtype = compute_dtype(hidden.dtype)
    logits = torch.nn.functional.linear(hidden.to(dtype), weight.to(dtype))
    scores = logits.sigmoid()
    choice = group_limited(scores + bias.to(dtype), num_group, topk_group)
    indices = torch.topk(choice, top_k, dim=-1)[1]
    weights = scores.gather(1, indices)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return logits, weights * routed_scaling_factor, indices


def routing_error(
    candidate: Routing, oracle: Routing, choice: torch.Tensor, implied: Callable[[torch.Tensor], torch.Tensor]
) -> float:
    """The largest of: the error of the logits; of the sorted `choice` scores [T, E] of the experts picked, so that a
    tie within rounding may fall either way; of the weights against those that the picks imply."""
    logits, weights, indices = candidate
    if indices.shape != oracle[2].shape or indices.dtype != torch.int64 or logits.shape != oracle[0].shape:
        return math.inf
    ordered = indices.sort(dim=-1)[0]
    if indices.numel() and (
        int(ordered[:, 0].min()) < 0
        or int(ordered[:, -1].max()) >= choice.shape[-1]
        or bool((ordered[:, 1:] == ordered[:, :-1]).any())
    ):
        return math.inf
    picked, wanted = (choice.gather(1, i).sort(dim=-1)[0] for i in (indices, oracle[2]))
    return max(row_error(logits, oracle[0]), row_error(picked, wanted), row_error(weights, implied(indices)))


def _softmax_error(candidate: Routing, oracle: Routing, *arguments: Any) -> float:
    hidden, weight, _, renormalize = arguments
    scores: torch.Tensor = torch.softmax(hidden.double() @ weight.double().T, dim=-1)

    def implied(indices: torch.Tensor) -> torch.Tensor:
        weights = scores.gather(1, indices)
        return weights / weights.sum(dim=-1, keepdim=True) if renormalize else weights

    return routing_error(candidate, oracle, scores, implied)


def _sigmoid_error(candidate: Routing, oracle: Routing, *arguments: Any) -> float:
    hidden, weight, bias, _, num_group, topk_group, renormalize, factor = arguments
    scores: torch.Tensor = (hidden.double() @ weight.double().T).sigmoid()
    choice = group_limited(scores + bias.double(), num_group, topk_group)

    def implied(indices: torch.Tensor) -> torch.Tensor:
        weights = scores.gather(1, indices)
        if renormalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * float(factor)

    return routing_error(candidate, oracle, choice, implied)


def routing_shapes(hidden: torch.Tensor, weight: torch.Tensor, top_k: int, dtype: torch.dtype) -> Routing:
    tokens, experts = hidden.shape[0], weight.shape[0]
    return (
        hidden.new_empty(tokens, experts, dtype=dtype),
        hidden.new_empty(tokens, top_k, dtype=dtype),
        hidden.new_empty(tokens, top_k, dtype=torch.int64),
    )


def _softmax_fake(hidden: torch.Tensor, weight: torch.Tensor, top_k: int, renormalize: bool) -> Routing:
    return routing_shapes(hidden, weight, top_k, hidden.dtype)


def _sigmoid_fake(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, top_k: int, *rest: object) -> Routing:
    return routing_shapes(hidden, weight, top_k, compute_dtype(hidden.dtype))


def routing_cost(outputs: Routing, hidden: torch.Tensor, *rest: Any) -> Cost:
    tokens, experts = outputs[0].shape
    return Cost(moved_bytes(hidden, *rest, *outputs), 2 * hidden.numel() * experts + 8 * tokens * experts)


def _softmax_cost(*arguments: Any) -> Cost:
    return routing_cost(_softmax_fake(*arguments), *arguments)


def _sigmoid_cost(*arguments: Any) -> Cost:
    return routing_cost(_sigmoid_fake(*arguments), *arguments)


SHAPES = ((1, 7, 2, 1), (5, 64, 8, 2), (3, 127, 61, 7), (17, 96, 128, 8), (4, 16, 4, 4), (0, 32, 8, 2))
GROUPED = (  # tokens, hidden size, experts, top_k, groups, groups kept
    (1, 7, 4, 1, 1, 1),
    (5, 64, 16, 4, 4, 2),
    (3, 127, 21, 5, 3, 2),
    (7, 96, 256, 8, 8, 4),
    (0, 32, 8, 2, 2, 1),
)


def _softmax_inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 71)
    for tokens, hidden_size, experts, top_k in SHAPES:
        weight = draw.normal(experts, hidden_size, scale=2 * hidden_size**-0.5)
        hidden = draw.normal(tokens, hidden_size)
        for renormalize in (True, False):
            label = f"T={tokens} H={hidden_size} E={experts} k={top_k} renormalize={renormalize}"
            yield Case(label, (hidden, weight, top_k, renormalize))
    weight = draw.normal(8, 32, scale=0.2)
    yield Case("rows apart", (spread(draw.normal(5, 32)), weight, 2, True))
    yield Case("zeros and 1e-4", (draw.extreme_rows(32)[::2], weight, 2, True))


def _sigmoid_inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 72)
    wide = Draw(torch.float64 if dtype == torch.float64 else torch.float32, 73)
    for tokens, hidden_size, experts, top_k, groups, kept in GROUPED:
        hidden, bias = draw.normal(tokens, hidden_size), wide.normal(experts, scale=0.1)
        for source, name in ((draw, "activation"), (wide, "float32")):
            weight = source.normal(experts, hidden_size, scale=2 * hidden_size**-0.5)
            label = f"T={tokens} H={hidden_size} E={experts} k={top_k} groups={kept}/{groups} {name} weight"
            yield Case(label, (hidden, weight, bias, top_k, groups, kept, True, 2.5))
            yield Case(f"{label} not renormalized", (hidden, weight, bias, top_k, groups, kept, False, 1.0))
    weight = wide.normal(8, 32, scale=0.2)
    yield Case("rows apart", (spread(draw.normal(5, 32)), weight, wide.normal(8), 2, 4, 2, True, 2.5))
    yield Case("biases below -1", (draw.normal(5, 32), weight, wide.normal(8, shift=-3), 2, 4, 2, True, 2.5))


SOFTMAX = "(Tensor hidden, Tensor weight, int top_k, bool renormalize) -> (Tensor, Tensor, Tensor)"
SIGMOID = (
    "(Tensor hidden, Tensor weight, Tensor bias, int top_k, int num_group, int topk_group, bool renormalize, "
    "float routed_scaling_factor) -> (Tensor, Tensor, Tensor)"
)

OPS = (
    Op(
        "router",
        "softmax",
        SOFTMAX,
        router_softmax,
        _softmax_fake,
        _softmax_inputs,
        SOFTMAX_TOLERANCE,
        _softmax_cost,
        error=_softmax_error,
    ),
    Op(
        "router",
        "grouped_sigmoid",
        SIGMOID,
        router_grouped_sigmoid,
        _sigmoid_fake,
        _sigmoid_inputs,
        SIGMOID_TOLERANCE,
        _sigmoid_cost,
        error=_sigmoid_error,
    ),
)
