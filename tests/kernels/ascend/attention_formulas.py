"""Attention in float64, one query at a time, straight from the vendor's formulas."""

from __future__ import annotations

import torch

LIMIT = 2147483647


def attention64(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    seen: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [N, Q, D], key [Nk, S, D], value [Nk, S, Dv] -> (output [N, Q, Dv], log of the sum of exponentials [N, Q]).
    `seen` [Q, S] is True where a query sees a key; one that sees none gets zeros."""
    heads, queries = query.shape[:2]
    output = torch.zeros(heads, queries, value.shape[2], dtype=torch.float64)
    lse = torch.full((heads, queries), -torch.inf, dtype=torch.float64)
    for head in range(heads):
        shared = head // (heads // key.shape[0])
        for row in range(queries):
            scores = key[shared].double() @ query[head, row].double() * scale
            if bias is not None:
                scores = scores + bias[head, row].double()
            if seen is not None:
                scores = scores[seen[row]]
            values = value[shared].double() if seen is None else value[shared][seen[row]].double()
            if scores.numel() == 0:
                continue
            if sink is not None:
                scores = torch.cat((scores, sink[head].double()[None]))
            lse[head, row] = torch.logsumexp(scores, 0)
            output[head, row] = torch.softmax(scores, 0)[: values.shape[0]] @ values
    return output, lse


def seen_by(mode: int, queries: int, keys: int, before: int = LIMIT, after: int = LIMIT) -> torch.Tensor:
    """Which keys each query sees in sparse_mode 2, 3 and 4."""
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    for row in range(queries):
        for column in range(keys):
            diagonal = row if mode == 2 else row + keys - queries
            low, high = (diagonal - before, diagonal + after) if mode == 4 else (-LIMIT, diagonal)
            seen[row, column] = low <= column <= high
    return seen


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Normal values of a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def close(got: torch.Tensor, expected: torch.Tensor, roundings: float = 2.0) -> bool:
    """Whether the rows agree up to that many roundings to the dtype of `got`, and to float32's sums."""
    unit = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[got.dtype]
    error = (got.double() - expected).norm(dim=-1)
    return bool((error <= roundings * unit * expected.norm(dim=-1) + 1e-7).all())
