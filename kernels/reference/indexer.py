"""DeepSeek's lightning indexer: which keys a query may attend to (DeepSeek-V3.2, arXiv 2512.02556, section 2.1)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from porter.kernels.contract import Case, Cost, Op, Tolerance, compute_dtype, moved_bytes
from porter.kernels.reference.attention import SCORES, attended_pairs, causal_mask
from porter.kernels.reference.draw import Draw, spread

TOLERANCE = Tolerance(
    "the error is how much better the best visible key left out is than the worst taken, relative to the largest sum "
    "over heads of |weight| |query| |key|: two scores, each a sum of D and then H products in the compute dtype",
    terms=lambda query, *rest: 64.0 * (query.shape[-1] + query.shape[-2]),
    roundings=0.0,
)


def visible_keys(
    attention_mask: torch.Tensor | None, queries: int, keys: int, rows: slice, device: torch.device
) -> torch.Tensor:
    """Bool [B or 1, ..., rows, T]: the keys that queries `rows` may see.

    No mask: causal, aligned to the end. An additive mask hides a key by -infinity or the lowest value of its dtype.
    """
    if attention_mask is None:
        return causal_mask(queries, keys, None, device)[rows][None]
    mask = attention_mask[..., rows, :]
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min


def index_scores(
    query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """[B, S, T]: sum over heads of weights * relu(scaling * query . key), plus `bias` [B or 1, S, T]."""
    products = torch.matmul(query, key.transpose(1, 2).unsqueeze(1)) * scaling
    scores = torch.matmul(weights.unsqueeze(-2), torch.relu(products)).squeeze(-2)
    return scores if bias is None else scores + bias.to(scores.dtype)


def indexer_lightning(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    top_k: int,
) -> torch.Tensor:
    """The `top_k` visible keys of the highest index score, for each query.

    query [B, S, H, D], key [B, T, D], weights [B, S, H], mask [B or 1, S, T] (bool or additive, see `visible_keys`)
    -> int32 [B, S, min(top_k, T)]: distinct keys in any order; where fewer are visible, hidden ones fill the row, which
    attention leaves out again. Scores are in the compute dtype; of keys with equal scores any may be taken. As
    upstream, neither side is rotated by a Hadamard matrix: it changes no dot product, and serves 8-bit keys alone.
    """
    dtype, keys, taken = compute_dtype(query.dtype), key.shape[1], min(top_k, key.shape[1])
    key, weights = key.to(dtype), weights.to(dtype)
    additive = attention_mask is not None and attention_mask.dtype != torch.bool
    chosen = []
    for rows in _blocks(query, keys):
        visible = visible_keys(attention_mask, query.shape[1], keys, rows, query.device)
        bias = attention_mask[:, rows] if additive and attention_mask is not None else None
        scores = index_scores(query[:, rows].to(dtype), key, weights[:, rows], bias, scaling)
        chosen.append(scores.masked_fill(~visible, -math.inf).topk(taken, dim=-1).indices.to(torch.int32))
    return torch.cat(chosen, dim=1)


def _blocks(query: torch.Tensor, keys: int) -> Iterator[slice]:
    """Blocks of the queries of `query` [B, S, H, D], one at least, whose products fit in memory."""
    rows = max(1, SCORES // max(1, query.shape[0] * query.shape[2] * keys))
    for start in range(0, max(1, query.shape[1]), rows):
        yield slice(start, start + rows)


def selection_error(candidate: torch.Tensor, oracle: torch.Tensor, *arguments: object) -> float:
    """The largest regret of any query, as the tolerance has it; infinite for what is no selection of visible keys.

    Selections are compared by what they are worth, not key by key: keys whose scores are within rounding of each
    other, and in particular equal, may be exchanged.
    """
    query, key, weights, attention_mask, scaling, _ = arguments
    assert isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and isinstance(weights, torch.Tensor)
    assert attention_mask is None or isinstance(attention_mask, torch.Tensor)
    assert isinstance(scaling, float)
    if candidate.shape != oracle.shape or candidate.dtype != torch.int32:
        return math.inf
    if candidate.numel() == 0:
        return 0.0
    query, key, weights = query.double(), key.double(), weights.double()
    shape = (*candidate.shape[:2], key.shape[1])
    visible = visible_keys(attention_mask, shape[1], shape[2], slice(None), query.device).expand(shape)
    bias = None if attention_mask is None or attention_mask.dtype == torch.bool else attention_mask.double()
    bias = None if bias is None else bias.expand(shape).masked_fill(~visible, 0.0)
    if bool((candidate < 0).any() or (candidate >= shape[2]).any()):
        return math.inf
    times = torch.zeros(shape, dtype=torch.int32).scatter_add_(-1, candidate.long(), torch.ones_like(candidate))
    taken = times.bool() & visible
    wanted = visible.sum(-1).clamp_max(candidate.shape[-1])
    if bool((times > 1).any() or (taken.sum(-1) != wanted).any()):
        return math.inf
    scores = index_scores(query, key, weights, bias, scaling)
    left = scores.masked_fill(taken | ~visible, -math.inf).amax(-1)
    worst = scores.masked_fill(~taken, math.inf).amin(-1)
    size = (weights.abs() * query.norm(dim=-1)).sum(-1) * key.norm(dim=-1).amax(-1, keepdim=True) * abs(scaling)
    size = size if bias is None else size + bias.abs().amax(-1)
    regret = (left - worst).clamp_min(0.0)
    return float(torch.where(regret == 0, 0.0, regret / size.clamp_min(1e-300)).max())


def _fake(query: torch.Tensor, key: torch.Tensor, *rest: object) -> torch.Tensor:
    top_k = rest[-1]
    assert isinstance(top_k, int)
    return query.new_empty((*query.shape[:2], min(top_k, key.shape[1])), dtype=torch.int32)


def _cost(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    top_k: int,
) -> Cost:
    batch, queries, heads, dim = query.shape
    keys = key.shape[1]
    pairs = queries * keys if attention_mask is not None else attended_pairs(queries, keys, None)
    output = 4 * batch * queries * min(top_k, keys)
    moved = moved_bytes(query, key, weights, attention_mask) + output
    return Cost(moved, batch * pairs * heads * (2 * dim + 3))


SHAPES = (  # batch, queries, heads, head_dim, keys, top_k
    (1, 1, 1, 1, 1, 1),
    (2, 5, 3, 16, 5, 3),
    (1, 1, 4, 33, 37, 7),
    (1, 1, 64, 128, 300, 64),
    (2, 3, 8, 32, 131, 64),
    (1, 67, 5, 31, 131, 16),
    (1, 4, 2, 16, 9, 100),
    (0, 3, 2, 16, 3, 2),
    (1, 0, 2, 16, 3, 2),
)


def _states(draw: Draw, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    batch, queries, heads, dim, keys, _ = shape
    return (
        draw.normal(batch, queries, heads, dim),
        draw.normal(batch, keys, dim),
        draw.normal(batch, queries, heads, scale=heads**-0.5),
    )


def _inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 71)
    for shape in SHAPES:
        scaling = float(shape[3]) ** -0.5
        yield Case(f"B, S, H, D, T, K = {shape}", (*_states(draw, shape), None, scaling, shape[-1]))
    query, key, weights = _states(draw, (2, 5, 4, 16, 64, 6))
    heads_first = spread(query.transpose(1, 2)).transpose(1, 2)
    yield Case("41 keys of a cache of 64", (heads_first, key[:, :41], spread(weights), None, 0.25, 6))
    yield Case("weights in float32", (query, key, weights.to(compute_dtype(dtype)), None, 0.25, 6))
    yield Case("every score is zero", (query, key, weights * 0, None, 0.25, 6))
    yield Case("keys that are all the same", (query, key[:, :1].expand(2, 64, 16), weights, None, 0.25, 6))
    some = weights * draw.integers(0, 2, 2, 5, 4)
    yield Case("scores of 1e5, and heads that weigh nothing", (query * 300, key * 300, some, None, 1.0, 6))
    yield Case("weights below zero alone", (query, key, -weights.abs(), None, 0.25, 6))
    yield from _mask_inputs(draw, *_states(draw, (2, 5, 4, 16, 19, 6)))


def _mask_inputs(draw: Draw, query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor) -> Iterator[Case]:
    lowest = torch.finfo(draw.dtype).min
    causal = causal_mask(5, 19, None, torch.device("cpu"))[None]
    padded = causal & (torch.arange(19) >= torch.tensor([13, 0])[:, None])[:, None]
    dead = padded.clone()
    dead[0, 1] = False
    holes = draw.uniform(2, 5, 19) < 0.5
    masks = {"causal": causal, "left padded": padded, "a query that sees nothing": dead, "holes": holes}
    for label, mask in masks.items():
        yield Case(f"bool mask, {label}", (query, key, weights, mask, 0.25, 6))
        for name, value in (("-inf", -math.inf), ("the lowest value", lowest)):
            additive = torch.zeros(mask.shape, dtype=draw.dtype).masked_fill(~mask, value)
            yield Case(f"additive mask of {name}, {label}", (query, key, weights, additive, 0.25, 6))
    yield Case("additive bias", (query, key, weights, draw.normal(1, 5, 19), 0.25, 6))


SCHEMA = "(Tensor query, Tensor key, Tensor weights, Tensor? attention_mask, float scaling, int top_k) -> Tensor"

OPS = (Op("indexer", "lightning", SCHEMA, indexer_lightning, _fake, _inputs, TOLERANCE, _cost, selection_error),)
