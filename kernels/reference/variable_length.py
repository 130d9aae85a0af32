"""Softmax attention within segments of one packed sequence: the patches of images, or of windows of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from porter.kernels.contract import Case, Cost, Op, Tolerance, compute_dtype, moved_bytes
from porter.kernels.reference.draw import Draw, spread

TOLERANCE = Tolerance(
    "as attention/gqa: scores of about unit size are dot products over D, and the output is a weighted mean of at most "
    "N values, which cancels to 1/sqrt(N) of their size; one rounding to the output dtype",
    terms=lambda query, *rest: 64.0 * (query.shape[-1] + query.shape[0]),
    roundings=1.5,
)

SCORES = 2**26
"""Scores held at once, so that a large image does not need memory in the square of its patches."""


def segments(cu_seqlens: torch.Tensor, tokens: int) -> list[tuple[int, int]]:
    """(first token, token after the last) of each segment that is not empty. Raises ValueError where `cu_seqlens` does
    not go up from 0 to `tokens`."""
    bounds: list[int] = cu_seqlens.tolist()
    pairs = list(itertools.pairwise(bounds))
    if not bounds or bounds[0] != 0 or bounds[-1] != tokens or any(low > high for low, high in pairs):
        raise ValueError(f"cu_seqlens must go up from 0 to the {tokens} tokens there are, got {bounds[:8]} ...")
    return [(low, high) for low, high in pairs if low < high]


def attention_variable_length(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, scaling: float
) -> torch.Tensor:
    """softmax(scaling * query key^T) value, where each token sees all tokens of its own segment and no others.

    query and key [N, H, D], value [N, H, Dv] hold the segments one after another; cu_seqlens [segments + 1] integers
    are where they begin, and N at last -> [N, H, Dv], contiguous. No mask is built, and nothing is computed between
    segments. Raises ValueError for cu_seqlens that do not go up from 0 to N.
    """
    dtype = compute_dtype(query.dtype)
    out = query.new_empty(*query.shape[:2], value.shape[2])
    for low, high in segments(cu_seqlens, query.shape[0]):
        keys, values = (t[low:high].to(dtype).transpose(0, 1) for t in (key, value))
        step = max(1, SCORES // max(1, query.shape[1] * (high - low)))
        for first in range(low, high, step):
            rows = query[first : min(first + step, high)].to(dtype).transpose(0, 1)
            scores = torch.matmul(rows, keys.transpose(1, 2)) * scaling
            attended = torch.matmul(torch.softmax(scores, dim=-1), values)
            out[first : first + rows.shape[1]] = attended.transpose(0, 1).to(query.dtype)
    return out


def _fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, scaling: float
) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], value.shape[2])


def _cost(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, scaling: float
) -> Cost:
    """Of segments of equal lengths, which is the least for their number: lengths are values, not shapes."""
    tokens, heads, size = query.shape
    value_size, count = value.shape[2], max(1, cu_seqlens.shape[0] - 1)
    pairs = heads * tokens * tokens // count
    output = tokens * heads * value_size * query.element_size()
    return Cost(moved_bytes(query, key, value, cu_seqlens) + output, 2 * pairs * (size + value_size) + 5 * pairs)


SHAPES: tuple[tuple[tuple[int, ...], int, int, int], ...] = (  # lengths, heads, D, Dv
    ((1,), 1, 1, 1),
    ((5,), 3, 16, 16),
    ((1, 2, 3), 2, 24, 17),
    ((64, 64, 31, 64), 4, 80, 80),
    ((97, 4), 2, 72, 72),
    ((33, 0, 65), 1, 33, 31),
    ((131,), 2, 128, 128),
    ((211, 190), 1, 16, 16),
    ((), 2, 16, 16),
)


def _inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 53)
    for lengths, heads, size, value_size in SHAPES:
        tokens = sum(lengths)
        states = tuple(draw.normal(tokens, heads, each) for each in (size, size, value_size))
        yield Case(f"lengths {lengths}, H, D, Dv = {heads, size, value_size}", (*states, _bounds(lengths), size**-0.5))
    query, key, value = (draw.normal(23, 2, 16) for _ in range(3))
    bounds = _bounds((7, 16))
    yield Case("int64 bounds", (query, key, value, bounds.long(), 0.25))
    yield Case("head rows apart", (spread(query), spread(key), spread(value), bounds, 0.25))
    together = draw.normal(23, 3, 2, 16)
    yield Case("views of one projection", (*together.unbind(1), bounds, 0.25))
    turned = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (query, key)]
    yield Case("heads outermost in memory", (*turned, value, bounds, 0.25))
    yield Case("scores of thousands", (query * 60, key * 60, value, bounds, 1.0))
    yield Case("values of 1e4", (query, key, value.clamp(-4, 4) * 1e4, bounds, 0.25))


def _bounds(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


SCHEMA = "(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, float scaling) -> Tensor"

OPS = (Op("attention", "variable_length", SCHEMA, attention_variable_length, _fake, _inputs, TOLERANCE, _cost),)
