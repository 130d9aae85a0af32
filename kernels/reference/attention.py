"""Softmax attention over grouped heads."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from porter.kernels.contract import Case, Cost, Op, Tolerance, compute_dtype, moved_bytes
from porter.kernels.reference.draw import Draw, spread

TOLERANCE = Tolerance(
    "scores of about unit size are dot products over D, exponentials carry their absolute error over, and the output "
    "is a weighted mean of T values, which cancels to 1/sqrt(T) of their size; one rounding to the output dtype",
    terms=lambda query, key, *rest: 64.0 * (query.shape[-1] + key.shape[2]),
    roundings=1.5,
)

SCORES = 2**26
"""Scores held at once, so that a long prefill does not need memory in the square of its length."""


def causal_mask(queries: int, keys: int, sliding_window: int | None, device: torch.device) -> torch.Tensor:
    """[queries, keys] bool, True = attend: the last query sees the last key, query i sees keys j <= keys - queries + i,
    and only those j > keys - queries + i - sliding_window where there is a window."""
    position = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    mask = key <= position
    return mask if sliding_window is None else mask & (key > position - sliding_window)


def masked_softmax(scores: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension; the mask is bool (True = attend) or added. A row with no key left is zeros."""
    if attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    else:
        scores = scores + attention_mask.to(scores.dtype)
    if scores.shape[-1] == 0:
        return scores
    dead = scores.amax(dim=-1, keepdim=True) == -torch.inf
    return torch.softmax(scores.masked_fill(dead, 0.0), dim=-1).masked_fill(dead, 0.0)


def attention_gqa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """softmax(scaling * query key^T + mask) value.

    query [B, Hq, S, D], key [B, Hk, T, D], value [B, Hk, T, Dv], Hq a multiple of Hk (query heads h * Hq/Hk onwards
    share key head h) -> [B, S, Hq, Dv], contiguous. No mask: causal, aligned to the end, within the window if there is
    one (see `causal_mask`). A mask [B or 1, 1 or Hq, S, T], bool or additive, decides alone.
    """
    dtype = compute_dtype(query.dtype)
    keys, values = key.to(dtype), value.to(dtype)
    if attention_mask is None:
        attention_mask = causal_mask(query.shape[2], key.shape[2], sliding_window, query.device)
    blocks = [
        _attend(query[:, :, rows].to(dtype), keys, values, attention_mask[..., rows, :], scaling).to(query.dtype)
        for rows in query_blocks(query, key.shape[2])
    ]
    return torch.cat(blocks, dim=1).contiguous()


def query_blocks(query: torch.Tensor, keys: int) -> Iterator[slice]:
    """Blocks of the queries of `query` [B, H, S, D], one at least, whose scores fit in memory."""
    rows = max(1, SCORES // max(1, query.shape[0] * query.shape[1] * keys))
    for start in range(0, max(1, query.shape[2]), rows):
        yield slice(start, start + rows)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """[B, S, Hq, Dv]. Query heads that share a key head go into one product, so that keys are not repeated."""
    batch, heads, queries, dim = query.shape
    shared = batch, key.shape[1], heads // key.shape[1] * queries
    scores = torch.matmul(query.reshape(*shared, dim), key.transpose(2, 3)) * scaling
    probabilities = masked_softmax(scores.view(batch, heads, queries, key.shape[2]), attention_mask)
    output = torch.matmul(probabilities.view(*shared, key.shape[2]), value)
    return output.view(batch, heads, queries, value.shape[-1]).transpose(1, 2)


def _fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])


def attended_pairs(queries: int, keys: int, sliding_window: int | None) -> int:
    """How many (query, key) pairs the causal mask leaves."""
    first = keys - queries + 1
    if sliding_window is None or sliding_window >= keys:
        return queries * (first + keys) // 2
    return sum(min(seen, sliding_window) for seen in range(first, keys + 1))


def _cost(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None,
) -> Cost:
    batch, heads, queries, dim = query.shape
    keys, value_dim = key.shape[2], value.shape[3]
    pairs = queries * keys if attention_mask is not None else attended_pairs(queries, keys, sliding_window)
    output = batch * queries * heads * value_dim * query.element_size()
    moved = moved_bytes(query, key, value, attention_mask) + output
    return Cost(moved, 2 * batch * heads * pairs * (dim + value_dim) + 5 * batch * heads * pairs)


SHAPES = (  # batch, query heads, key heads, queries, keys, head_dim, value head_dim, window
    (1, 1, 1, 1, 1, 1, 1, None),
    (2, 4, 2, 5, 5, 16, 16, None),
    (1, 8, 2, 1, 37, 64, 64, None),
    (2, 6, 6, 3, 17, 24, 16, None),
    (1, 7, 1, 13, 13, 33, 31, None),
    (1, 16, 8, 1, 131, 128, 128, None),
    (1, 2, 1, 67, 131, 32, 32, None),
    (2, 4, 2, 11, 11, 16, 16, 3),
    (1, 4, 2, 1, 29, 32, 32, 7),
    (1, 4, 1, 9, 23, 16, 16, 100),
    (0, 4, 2, 3, 3, 16, 16, None),
    (1, 4, 2, 0, 3, 16, 16, None),
)


def _states(draw: Draw, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, query_heads, key_heads, queries, keys, dim, value_dim = shape
    return (
        draw.normal(batch, query_heads, queries, dim),
        draw.normal(batch, key_heads, keys, dim),
        draw.normal(batch, key_heads, keys, value_dim),
    )


def _inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 51)
    for *shape, window in SHAPES:
        states = _states(draw, tuple(shape))
        scaling = float(states[0].shape[-1]) ** -0.5
        yield Case(f"B, Hq, Hk, S, T, D, Dv = {shape} window={window}", (*states, None, scaling, window))
    yield from _layout_inputs(draw)
    yield from mask_inputs(draw, *_states(draw, (2, 4, 2, 5, 9, 16, 16)))
    query, key, value = _states(draw, (1, 2, 1, 3, 8, 16, 16))
    yield Case("scores of thousands", (query * 60, key * 60, value, None, 1.0, None))
    yield Case("values of 1e4", (query, key, value.clamp(-4, 4) * 1e4, None, 0.25, None))


def _layout_inputs(draw: Draw) -> Iterator[Case]:
    query, key, value = _states(draw, (2, 4, 2, 3, 64, 16, 16))
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    for length in (3, 11, 63):
        cached = key[:, :, :length], value[:, :, :length]
        yield Case(f"{length} keys of a cache of 64", (query, *cached, None, 0.25, None))
    yield Case("one query of a cache of 64", (query[:, :, :1], key[:, :, :19], value[:, :, :19], None, 0.25, None))
    yield Case("head rows apart", (spread(query), spread(key), spread(value), None, 0.25, None))


def mask_inputs(draw: Draw, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Iterator[Case]:
    """Masks of every kind that the Op allows, for query [2, H, 5, D] and 9 keys."""
    lowest = torch.finfo(draw.dtype).min
    causal = causal_mask(5, 9, None, torch.device("cpu"))[None, None]
    padded = causal & (torch.arange(9) >= torch.tensor([4, 0])[:, None])[:, None, None]
    dead = padded.clone()
    dead[0, :, 1] = False
    heads = draw.uniform(2, query.shape[1], 5, 9) < 0.7
    heads[..., 0] = True
    for label, mask in (("causal", causal), ("left padded", padded), ("a row without keys", dead), ("per head", heads)):
        yield Case(f"bool mask, {label}", (query, key, value, mask, 0.25, None))
        infinite = torch.zeros(mask.shape, dtype=draw.dtype).masked_fill(~mask, -torch.inf)
        yield Case(f"additive mask of -inf, {label}", (query, key, value, infinite, 0.25, None))
    finite = torch.zeros(padded.shape, dtype=draw.dtype).masked_fill(~padded, lowest)
    yield Case("additive mask of the lowest value, left padded", (query, key, value, finite, 0.25, None))
    yield Case("additive bias", (query, key, value, draw.normal(1, query.shape[1], 5, 9), 0.25, None))
    yield Case("a mask beside a window decides alone", (query, key, value, causal, 0.25, 2))


SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? attention_mask, float scaling, int? sliding_window) -> Tensor"
)

OPS = (Op("attention", "gqa", SCHEMA, attention_gqa, _fake, _inputs, TOLERANCE, _cost),)
