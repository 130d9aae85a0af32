"""The next token from the logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from porter.kernels.contract import Case, Cost, Op, Tolerance, compute_dtype, moved_bytes
from porter.kernels.reference.draw import Draw, spread

GREEDY_TOLERANCE = Tolerance(
    "nothing is computed: the chosen logit must be the largest",
    terms=lambda logits: 1.0,
    roundings=0.0,
)
SAMPLING_TOLERANCE = Tolerance(
    "a cumulative sum of V probabilities; the number given must fall into the chosen token's interval of it, to within "
    "the error of the sum",
    terms=lambda logits, *rest: 64.0 * logits.shape[-1],
    roundings=0.0,
)


def sampling_greedy(logits: torch.Tensor) -> torch.Tensor:
    """logits [B, V] -> ids [B] int64 of the largest logit, the first of equals."""
    largest = logits == logits.amax(dim=-1, keepdim=True)
    return largest.to(torch.int32).argmax(dim=-1)


def _cumulative(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(probabilities kept, added up in descending order [B, V], and 1 at the end; the ids in that order [B, V])."""
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}; use sampling/greedy for the likeliest token")
    dtype, vocabulary = compute_dtype(logits.dtype), logits.shape[-1]
    scaled, order = torch.sort(logits.to(dtype) / temperature, dim=-1, descending=True, stable=True)
    if 0 < top_k < vocabulary:
        scaled = scaled.masked_fill(torch.arange(vocabulary, device=logits.device) >= top_k, -torch.inf)
    probabilities = torch.softmax(scaled, dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = (before < top_p) | (torch.arange(vocabulary, device=logits.device) == 0)
    cumulative = probabilities.masked_fill(~kept, 0.0).cumsum(dim=-1)
    return cumulative / cumulative[..., -1:], order


def sampling_top_k_top_p(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, uniform: torch.Tensor
) -> torch.Tensor:
    """logits [B, V], uniform [B] in [0, 1) -> ids [B] int64, determined by the uniforms.

    Divides by `temperature`, keeps the `top_k` largest (all if 0), of these the likeliest until their probabilities
    reach `top_p` (always one), and takes the first token, in descending order with equals in order of id, whose
    cumulative probability exceeds the uniform. Raises ValueError for a temperature that is not positive.
    """
    cumulative, order = _cumulative(logits, temperature, top_k, top_p)
    place = torch.searchsorted(cumulative, uniform.to(cumulative.dtype)[:, None], right=True)
    # Rounding may leave the last sum below a uniform just under 1; the last token with any probability takes those.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return order.gather(1, torch.minimum(place, last))[:, 0]


def _greedy_error(candidate: torch.Tensor, oracle: torch.Tensor, logits: torch.Tensor) -> float:
    if candidate.shape != oracle.shape or candidate.dtype != torch.int64:
        return math.inf
    return 0.0 if torch.equal(candidate, oracle) else math.inf


def _sampling_error(candidate: torch.Tensor, oracle: torch.Tensor, *arguments: Any) -> float:
    """How far a uniform lies outside the chosen token's interval of the float64 cumulative distribution."""
    logits, temperature, top_k, top_p, uniform = arguments
    if candidate.shape != oracle.shape or candidate.dtype != torch.int64:
        return math.inf
    if candidate.numel() == 0:
        return 0.0
    upper, order = _cumulative(logits.double(), temperature, top_k, top_p)
    lower = torch.cat((torch.zeros_like(upper[:, :1]), upper[:, :-1]), dim=-1)
    chosen = (order == candidate[:, None]).to(torch.int64).argmax(dim=-1, keepdim=True)
    low, high, at = lower.gather(1, chosen)[:, 0], upper.gather(1, chosen)[:, 0], uniform.double()
    outside = torch.maximum(low - at, at - high).clamp_min(0.0)
    return float(outside.masked_fill(high <= low, math.inf).max())


def _fake(logits: torch.Tensor, *rest: object) -> torch.Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


def _cost(logits: torch.Tensor, *rest: object) -> Cost:
    return Cost(moved_bytes(logits, *rest) + 8 * logits.shape[0], logits.numel())


def _sampling_cost(logits: torch.Tensor, *rest: object) -> Cost:
    sorting = logits.numel() * max(1, math.ceil(math.log2(max(logits.shape[-1], 2))))
    return Cost(moved_bytes(logits, *rest) + 8 * logits.shape[0], sorting + 6 * logits.numel())


def _logits(draw: Draw) -> Iterator[tuple[str, torch.Tensor]]:
    for shape in ((1, 1), (3, 7), (2, 1031), (5, 64), (0, 32)):
        yield f"{list(shape)}", draw.normal(*shape, scale=3.0)
    yield "rows apart", spread(draw.normal(3, 50, scale=3.0))
    yield "one step of a longer output", draw.normal(3, 4, 50, scale=3.0)[:, -1]
    yield "banned tokens", draw.normal(3, 50).masked_fill(draw.uniform(3, 50) < 0.5, -torch.inf)
    yield "1e4", draw.normal(3, 50).clamp(-4, 4) * 1e4


def _greedy_inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 91)
    for label, logits in _logits(draw):
        yield Case(label, (logits,))
    yield Case("equals", (torch.tensor([[0.0, 2.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0]], dtype=dtype),))


def _sampling_inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 92)
    for label, logits in _logits(draw):
        uniform = draw.uniform(logits.shape[0])
        for temperature, top_k, top_p in ((1.0, 0, 1.0), (0.7, 5, 0.9), (1.3, 1, 1.0), (1.0, 0, 0.0), (2.0, 40, 0.5)):
            settings = f"temperature={temperature} top_k={top_k} top_p={top_p}"
            yield Case(f"{label} {settings}", (logits, temperature, top_k, top_p, uniform))
    last = torch.full((3,), 1 - 2.0**-24)
    yield Case("a uniform just under 1", (draw.normal(3, 50), 1.0, 7, 1.0, last))
    yield Case("a uniform of 0", (draw.normal(3, 50), 1.0, 0, 0.9, torch.zeros(3)))


GREEDY = "(Tensor logits) -> Tensor"
SAMPLING = "(Tensor logits, float temperature, int top_k, float top_p, Tensor uniform) -> Tensor"

OPS = (
    Op(
        "sampling",
        "greedy",
        GREEDY,
        sampling_greedy,
        _fake,
        _greedy_inputs,
        GREEDY_TOLERANCE,
        _cost,
        error=_greedy_error,
    ),
    Op(
        "sampling",
        "top_k_top_p",
        SAMPLING,
        sampling_top_k_top_p,
        _fake,
        _sampling_inputs,
        SAMPLING_TOLERANCE,
        _sampling_cost,
        error=_sampling_error,
    ),
)
