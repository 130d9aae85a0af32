"""DeepSeek-V4's routers: scores sqrt(softplus(logit)), of the experts with the best, or of those a table names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from porter.kernels.contract import Case, Cost, Op, Tolerance, compute_dtype, moved_bytes
from porter.kernels.reference.draw import Draw, spread
from porter.kernels.reference.router import Routing, routing_error, routing_shapes

TOLERANCE = Tolerance(
    "logits are dot products over H; a score changes relatively by at most their absolute error; logits and weights "
    "stay in the compute dtype whatever the activations have",
    terms=lambda hidden, weight, *rest: 64.0 * (hidden.shape[-1] + 16),
    roundings=0.0,
)
SUM_FLOOR = 1e-20


def _scored(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and scores [T, E] in the compute dtype."""
    dtype = compute_dtype(hidden.dtype)
    logits = torch.nn.functional.linear(hidden.to(dtype), weight.to(dtype))
    return logits, torch.nn.functional.softplus(logits).sqrt()


def _weighed(scores: torch.Tensor, indices: torch.Tensor, factor: float) -> torch.Tensor:
    weights = scores.gather(1, indices)
    return weights / (weights.sum(dim=-1, keepdim=True) + SUM_FLOOR) * factor


def router_sqrtsoftplus(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, top_k: int, routed_scaling_factor: float
) -> Routing:
    """hidden [T, H], weight [E, H], bias [E] -> (logits [T, E], weights [T, k], indices [T, k] int64).

    The k largest of score + bias are chosen; their scores, without the bias, are divided by their sum. Logits and
    weights are float32 (float64 for float64). Equals transformers' DeepseekV4TopKRouter.
    """
    logits, scores = _scored(hidden, weight)
    indices = torch.topk(scores + bias.to(scores.dtype), top_k, dim=-1)[1]
    return logits, _weighed(scores, indices, routed_scaling_factor), indices


def router_hash(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    input_ids: torch.Tensor,
    routed_scaling_factor: float,
) -> Routing:
    """As `router_sqrtsoftplus` with the experts that the table [V, k] int64 lists for the token ids [T] int64.

    Equals transformers' DeepseekV4HashRouter.
    """
    logits, scores = _scored(hidden, weight)
    indices = table[input_ids]
    return logits, _weighed(scores, indices, routed_scaling_factor), indices


def _error(candidate: Routing, oracle: Routing, *arguments: Any) -> float:
    hidden, weight, bias, _, factor = arguments
    _, scores = _scored(hidden.double(), weight.double())

    def implied(indices: torch.Tensor) -> torch.Tensor:
        return _weighed(scores, indices, float(factor))

    return routing_error(candidate, oracle, scores + bias.double(), implied)


def _fake(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, top_k: int, factor: float) -> Routing:
    return routing_shapes(hidden, weight, top_k, compute_dtype(hidden.dtype))


def _hash_fake(
    hidden: torch.Tensor, weight: torch.Tensor, table: torch.Tensor, input_ids: torch.Tensor, factor: float
) -> Routing:
    return routing_shapes(hidden, weight, table.shape[1], compute_dtype(hidden.dtype))


def _cost(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, top_k: int, factor: float) -> Cost:
    wide = compute_dtype(hidden.dtype).itemsize
    outputs = hidden.shape[0] * (wide * weight.shape[0] + (wide + 8) * top_k)
    return Cost(moved_bytes(hidden, weight, bias) + outputs, 2 * hidden.shape[0] * weight.numel())


def _hash_cost(
    hidden: torch.Tensor, weight: torch.Tensor, table: torch.Tensor, input_ids: torch.Tensor, factor: float
) -> Cost:
    """Reads one row of the table for each token."""
    wide = compute_dtype(hidden.dtype).itemsize
    outputs = hidden.shape[0] * (wide * weight.shape[0] + (wide + 16) * table.shape[1])
    return Cost(moved_bytes(hidden, weight, input_ids) + outputs, 2 * hidden.shape[0] * weight.numel())


SHAPES = ((1, 7, 2, 1), (5, 64, 8, 2), (3, 127, 61, 7), (17, 96, 256, 6), (4, 16, 4, 4), (0, 32, 8, 2))


def _hidden(draw: Draw, wide: Draw) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, int]]:
    """(label, hidden, weight, experts per token)."""
    for tokens, size, experts, top_k in SHAPES:
        for source, name in ((draw, "activation"), (wide, "float32")):
            weight = source.normal(experts, size, scale=2 * size**-0.5)
            yield f"T={tokens} H={size} E={experts} k={top_k} {name} weight", draw.normal(tokens, size), weight, top_k
    yield "rows apart", spread(draw.normal(5, 32)), draw.normal(8, 32, scale=0.2), 2
    yield "logits of hundreds", draw.normal(5, 32, scale=30.0), draw.normal(8, 32), 3
    yield "zeros, 1e4 and 1e-4", draw.extreme_rows(32)[::2], draw.normal(8, 32, scale=0.2), 2


def _draws(dtype: torch.dtype, seed: int) -> tuple[Draw, Draw]:
    return Draw(dtype, seed), Draw(torch.float64 if dtype == torch.float64 else torch.float32, seed + 1)


def _inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw, wide = _draws(dtype, 74)
    for label, hidden, weight, top_k in _hidden(draw, wide):
        yield Case(label, (hidden, weight, wide.normal(weight.shape[0], scale=0.1), top_k, 1.5))


def _hash_inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw, wide = _draws(dtype, 76)
    for label, hidden, weight, top_k in _hidden(draw, wide):
        table = wide.uniform(19, weight.shape[0]).topk(top_k, dim=-1).indices
        yield Case(label, (hidden, weight, table, draw.integers(0, 19, hidden.shape[0]), 1.5))


TOP_K = (
    "(Tensor hidden, Tensor weight, Tensor bias, int top_k, float routed_scaling_factor) -> (Tensor, Tensor, Tensor)"
)
HASH = (
    "(Tensor hidden, Tensor weight, Tensor table, Tensor input_ids, float routed_scaling_factor) -> "
    "(Tensor, Tensor, Tensor)"
)

OPS = (
    Op("router", "sqrtsoftplus", TOP_K, router_sqrtsoftplus, _fake, _inputs, TOLERANCE, _cost, error=_error),
    Op("router", "hash", HASH, router_hash, _hash_fake, _hash_inputs, TOLERANCE, _hash_cost),
)
