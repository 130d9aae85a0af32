"""Softmax attention with a sink: a learned logit per head that takes weight and gives no value."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from porter.kernels.contract import Case, Cost, Op, Tolerance, compute_dtype
from porter.kernels.reference.attention import OPS as ATTENTION
from porter.kernels.reference.attention import TOLERANCE as PLAIN
from porter.kernels.reference.attention import causal_mask, query_blocks
from porter.kernels.reference.draw import Draw

(GQA,) = (op for op in ATTENTION if op.variant == "gqa")

TOLERANCE = Tolerance(f"{PLAIN.argument}; the sink is one more score", PLAIN.terms, PLAIN.roundings)


def attention_sink(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """As attention/gqa, with sinks [Hq] among the scores of each query: the weights of the keys add up to less than
    one, and a query that sees no key gets zeros.

    Equals the eager attention of transformers' gpt-oss and DeepSeek-V4.
    """
    dtype = compute_dtype(query.dtype)
    keys, values, sinks = key.to(dtype), value.to(dtype), sinks.to(dtype)
    if attention_mask is None:
        attention_mask = causal_mask(query.shape[2], key.shape[2], sliding_window, query.device)
    blocks = [
        _attend(query[:, :, rows].to(dtype), keys, values, sinks, attention_mask[..., rows, :], scaling).to(query.dtype)
        for rows in query_blocks(query, key.shape[2])
    ]
    return torch.cat(blocks, dim=1).contiguous()


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """[B, S, Hq, Dv]."""
    batch, heads, queries, dim = query.shape
    shared = batch, key.shape[1], heads // key.shape[1] * queries
    scores = torch.matmul(query.reshape(*shared, dim), key.transpose(2, 3)) * scaling
    scores = scores.view(batch, heads, queries, key.shape[2])
    if attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    else:
        scores = scores + attention_mask.to(scores.dtype)
    sink = sinks.view(1, -1, 1, 1).expand(batch, heads, queries, 1)
    probabilities = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]
    output = torch.matmul(probabilities.reshape(*shared, key.shape[2]), value)
    return output.view(batch, heads, queries, value.shape[-1]).transpose(1, 2)


def _fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])


def _cost(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None,
) -> Cost:
    plain = GQA.cost(query, key, value, attention_mask, scaling, sliding_window)
    return Cost(plain.bytes + sinks.numel() * sinks.element_size(), plain.flops)


def _inputs(dtype: torch.dtype) -> Iterator[Case]:
    wide = Draw(torch.float64 if dtype == torch.float64 else torch.float32, 52)
    for case in GQA.inputs(dtype):
        query, key, value, *rest = case.arguments
        sinks = wide.normal(query.shape[1], scale=2.0)
        yield Case(case.label, (query, key, value, sinks, *rest))
    yield from _shared_inputs(Draw(dtype, 53), wide)


def _shared_inputs(draw: Draw, wide: Draw) -> Iterator[Case]:
    """Keys that are the values, as in DeepSeek-V4, and sinks that take nearly all or nearly nothing."""
    query, key = draw.normal(2, 6, 5, 24), draw.normal(2, 1, 11, 24)
    yield Case("the keys are the values", (query, key, key, wide.normal(6), None, 0.2, 4))
    for value in (-1e4, 30.0):
        yield Case(f"sinks of {value}", (query, key, key, wide.normal(6, scale=0.0, shift=value), None, 0.2, None))
    yield Case("sinks in the activations' dtype", (query, key, key, draw.normal(6), None, 0.2, None))


SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor sinks, Tensor? attention_mask, float scaling, int? sliding_window)"
    " -> Tensor"
)

OPS = (Op("attention", "sink", SCHEMA, attention_sink, _fake, _inputs, TOLERANCE, _cost),)
