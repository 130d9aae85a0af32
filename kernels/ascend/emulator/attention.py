"""Softmax attention as the vendor's matrix and vector units compute it: scores and sums in float32, the exponentials
rounded to the dtype of the values before the second product, one rounding of the quotient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sequence:
    """One sequence of a call: query [N, Q, D], key [Nk, S, D], value [Nk, S, Dv], and the parts that rope turned."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_rope: torch.Tensor | None = None
    key_rope: torch.Tensor | None = None


@dataclass(frozen=True)
class Extras:
    """What else shapes the weights: `hidden` [.., Q, S] True where masked out, `bias` [N, Q, S] added to the scaled
    scores, `sink` [N] one more logit without a value."""

    hidden: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    sink: torch.Tensor | None = None


@dataclass(frozen=True)
class Attended:
    """output [N, Q, Dv] in the queries' dtype; the largest score and the sum of exponentials [N, Q, 1] in float32."""

    output: torch.Tensor
    largest: torch.Tensor
    total: torch.Tensor

    @property
    def lse(self) -> torch.Tensor:
        """Logarithm of the sum of the exponentials of the scores."""
        return self.largest + self.total.log()


def attend(sequence: Sequence, extras: Extras, scale: float) -> Attended:
    """softmax(scale * (query key^T + query_rope key_rope^T) + bias) value. A query without a key gets zeros."""
    scores = _products(sequence.query, sequence.key)
    if sequence.query_rope is not None and sequence.key_rope is not None:
        scores = scores + _products(sequence.query_rope, sequence.key_rope)
    scores = scores * scale
    if extras.bias is not None:
        scores = scores + extras.bias.float()
    if extras.hidden is not None:
        scores = scores.masked_fill(extras.hidden, -torch.inf)
    if extras.sink is not None:
        sink = extras.sink.float()[:, None, None].expand(*scores.shape[:2], 1)
        scores = torch.cat((scores, sink), dim=-1)
    heads, queries, columns = scores.shape
    if columns == 0:
        zero = scores.new_zeros(heads, queries, 1)
        return Attended(sequence.query.new_zeros(heads, queries, sequence.value.shape[-1]), zero - torch.inf, zero)
    largest = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - largest.masked_fill(largest == -torch.inf, 0.0))
    total = weights.sum(dim=-1, keepdim=True)
    keys = sequence.value.shape[1]
    summed = _weighted(weights[..., :keys].to(sequence.value.dtype), sequence.value)
    output = torch.where(total > 0, summed / total, 0.0)
    return Attended(output.to(sequence.query.dtype), largest, total)


def _products(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    heads, queries, dim = query.shape
    shared = query.float().reshape(key.shape[0], heads // key.shape[0] * queries, dim)
    return torch.matmul(shared, key.float().transpose(1, 2)).view(heads, queries, key.shape[1])


def _weighted(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    heads, queries, keys = weights.shape
    shared = weights.float().reshape(value.shape[0], heads // value.shape[0] * queries, keys)
    return torch.matmul(shared, value.float()).view(heads, queries, value.shape[-1])


def hidden_by_mode(
    mode: int, queries: int, keys: int, before: int, after: int, mask: torch.Tensor | None
) -> torch.Tensor | None:
    """Which keys are masked out, [.., queries, keys], or None.

    0: the mask, and what lies outside `before` and `after`, counted from the first query and key; nothing at all
    without a mask. 1: the mask. 2: later keys, counted from the first query and key. 3: the same counted from the last
    ones. 4: outside `before` and `after`, counted from the last ones. The mask of 2 to 4 is the compressed one, which
    says no more than the mode.
    """
    if mask is None:
        return None
    ahead = torch.arange(keys) - torch.arange(queries)[:, None]
    if mode < 2:
        given = mask.bool()[..., :queries, :keys]
        return given if mode == 1 else given | (ahead > after) | (ahead < -before)
    if mode == 2:
        return ahead > 0
    ahead = ahead - (keys - queries)
    return ahead > 0 if mode == 3 else (ahead > after) | (ahead < -before)


def from_sums(sums: list[int]) -> Iterator[slice]:
    """The rows of each sequence of prefix sums; trailing zeros stand for sequences left out."""
    start = 0
    for end in sums:
        yield slice(start, max(start, end))
        start = max(start, end)
