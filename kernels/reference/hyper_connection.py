"""Manifold-constrained hyper-connections: several residual streams, mixed by matrices that Sinkhorn-Knopp normalises
(DeepSeek-V4, section 2.2; Xie et al. 2026, arXiv 2512.24880)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from porter.kernels.contract import Case, Cost, Op, Tolerance, compute_dtype, moved_bytes
from porter.kernels.reference.draw import Draw

Mixing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _terms(streams: torch.Tensor, *rest: object) -> float:
    return 64.0 * (streams.shape[-1] * streams.shape[-2] + 64)


TOLERANCE = Tolerance(
    "the mixing logits are dot products over all streams, and sigmoid, softmax and the normalisations, each of which "
    "shrinks errors, carry their absolute error over to relative error; one rounding of the mixed stream",
    terms=_terms,
)
EXPAND_TOLERANCE = Tolerance(
    "N + 1 products per value, some of which may cancel; one rounding to the output dtype",
    terms=lambda streams, *rest: 64.0 * (streams.shape[-2] + 1),
)


def mixing_logits(streams: torch.Tensor, fn: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """[B, S, M] in the compute dtype: a token's streams [B, S, N, D] as one row, RMS-normalised, times fn [M, N D]."""
    flat = streams.to(compute_dtype(streams.dtype)).flatten(2)
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    return torch.nn.functional.linear(flat, fn.to(flat.dtype))


def doubly_stochastic(weights: torch.Tensor, eps: float, iterations: int) -> torch.Tensor:
    """Positive weights [..., N, N] with columns, then in turn rows and columns, divided by their sums plus `eps`."""
    weights = weights / (weights.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        weights = weights / (weights.sum(dim=-1, keepdim=True) + eps)
        weights = weights / (weights.sum(dim=-2, keepdim=True) + eps)
    return weights


def _weighted(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[B, S, D] in the dtype of `streams`: their sum, weighted by [B, S, N]."""
    return (weights.unsqueeze(-1) * streams.to(weights.dtype)).sum(dim=2).to(streams.dtype)


def hyper_connection_collapse(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> Mixing:
    """What a block reads of the streams, and how its output will be written back.

    streams [B, S, N, D], fn [(2 + N) N, N D], base [(2 + N) N], scale [3] -> (post [B, S, N], comb [B, S, N, N],
    collapsed [B, S, D]); post and comb in the compute dtype. Of logits * scale + base the first N weigh the streams
    (sigmoid + eps), the next N the output (2 sigmoid), the last N N mix streams (softmax + eps, then Sinkhorn-Knopp).
    Equals transformers' DeepseekV4HyperConnection, with nothing rounded in between.
    """
    count, dtype = streams.shape[2], compute_dtype(streams.dtype)
    logits = mixing_logits(streams, fn, norm_eps)
    factors = scale.to(dtype).repeat_interleave(torch.tensor([count, count, count * count], device=scale.device))
    pre, post, comb = (logits * factors + base.to(dtype)).split([count, count, count * count], dim=-1)
    comb = torch.softmax(comb.unflatten(-1, (count, count)), dim=-1) + eps
    collapsed = _weighted(streams, torch.sigmoid(pre) + eps)
    return 2 * torch.sigmoid(post), doubly_stochastic(comb, eps, iterations), collapsed


def hyper_connection_expand(
    streams: torch.Tensor, output: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """[B, S, N, D]: stream k becomes post[k] * output + sum over j of comb[j, k] * streams[j]; rounded once.

    streams [B, S, N, D], output [B, S, D], post [B, S, N], comb [B, S, N, N].
    """
    dtype = compute_dtype(streams.dtype)
    mixed = torch.matmul(comb.to(dtype).transpose(-1, -2), streams.to(dtype))
    return (post.to(dtype).unsqueeze(-1) * output.to(dtype).unsqueeze(-2) + mixed).to(streams.dtype)


def hyper_connection_head(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, norm_eps: float, eps: float
) -> torch.Tensor:
    """[B, S, D]: the streams [B, S, N, D] weighted by sigmoid(logits * scale + base) + eps; fn [N, N D], base [N],
    scale [1]. Equals transformers' DeepseekV4HyperHead."""
    dtype = compute_dtype(streams.dtype)
    logits = mixing_logits(streams, fn, norm_eps)
    return _weighted(streams, torch.sigmoid(logits * scale.to(dtype) + base.to(dtype)) + eps)


def _fake(streams: torch.Tensor, *rest: object) -> Mixing:
    shape, dtype = streams.shape, compute_dtype(streams.dtype)
    post = streams.new_empty(shape[:3], dtype=dtype)
    return post, streams.new_empty((*shape[:3], shape[2]), dtype=dtype), streams.new_empty((*shape[:2], shape[3]))


def _fake_expand(streams: torch.Tensor, *rest: object) -> torch.Tensor:
    return streams.new_empty(streams.shape)


def _fake_head(streams: torch.Tensor, *rest: object) -> torch.Tensor:
    return streams.new_empty((*streams.shape[:2], streams.shape[3]))


def _cost(streams: torch.Tensor, fn: torch.Tensor, *rest: object) -> Cost:
    tokens, (rows, size) = streams.shape[0] * streams.shape[1], fn.shape
    # Of the rows of fn those of the streams' own weights are used up; the others are returned.
    kept = tokens * (rows - streams.shape[2]) * compute_dtype(streams.dtype).itemsize
    collapsed = tokens * streams.shape[3] * streams.element_size()
    return Cost(moved_bytes(streams, fn, *rest) + kept + collapsed, tokens * (2 * rows * size + 5 * size))


def _expand_cost(streams: torch.Tensor, *rest: object) -> Cost:
    return Cost(moved_bytes(streams, streams, *rest), 2 * streams.numel() * (streams.shape[2] + 1))


SHAPES = ((1, 1, 1, 1), (2, 5, 4, 16), (1, 3, 4, 67), (3, 1, 2, 128), (1, 7, 3, 33), (0, 3, 4, 16), (2, 0, 4, 16))


def _streams(draw: Draw) -> Iterator[tuple[str, torch.Tensor]]:
    for shape in SHAPES:
        yield f"B, S, N, D = {shape}", draw.normal(*shape)
    yield "zeros, 1e4 and 1e-4", draw.extreme_rows(4 * 32).view(2, 2, 4, 32)
    yield "streams transposed", draw.normal(2, 4, 3, 16).transpose(1, 2)
    yield "one stream shown four times", draw.normal(2, 3, 1, 16).expand(2, 3, 4, 16)


def _inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw, wide = Draw(dtype, 91), Draw(torch.float64 if dtype == torch.float64 else torch.float32, 92)
    for label, streams in _streams(draw):
        count, size = streams.shape[2:]
        rows = (2 + count) * count
        fn = wide.normal(rows, count * size, scale=(count * size) ** -0.5)
        for name, scale, iterations in (("20 iterations", 1.0, 20), ("one iteration, scale 5", 5.0, 1)):
            factors = wide.normal(3, scale=0.2, shift=scale)
            yield Case(f"{label}, {name}", (streams, fn, wide.normal(rows, scale=0.5), factors, 1e-6, 1e-6, iterations))


def _expand_inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw, wide = Draw(dtype, 93), Draw(torch.float64 if dtype == torch.float64 else torch.float32, 94)
    for label, streams in _streams(draw):
        batch, length, count, size = streams.shape
        comb = torch.softmax(wide.normal(batch, length, count, count), dim=-1)
        yield Case(label, (streams, draw.normal(batch, length, size), wide.normal(batch, length, count) ** 2, comb))


def _head_inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw, wide = Draw(dtype, 95), Draw(torch.float64 if dtype == torch.float64 else torch.float32, 96)
    for label, streams in _streams(draw):
        count, size = streams.shape[2:]
        fn = wide.normal(count, count * size, scale=(count * size) ** -0.5)
        yield Case(label, (streams, fn, wide.normal(count), wide.normal(1, shift=1.0), 1e-6, 1e-6))


COLLAPSE = (
    "(Tensor streams, Tensor fn, Tensor base, Tensor scale, float norm_eps, float eps, int iterations) -> "
    "(Tensor, Tensor, Tensor)"
)
EXPAND = "(Tensor streams, Tensor output, Tensor post, Tensor comb) -> Tensor"
HEAD = "(Tensor streams, Tensor fn, Tensor base, Tensor scale, float norm_eps, float eps) -> Tensor"

NAME = "hyper_connection"
OPS = (
    Op(NAME, "collapse", COLLAPSE, hyper_connection_collapse, _fake, _inputs, TOLERANCE, _cost),
    Op(NAME, "expand", EXPAND, hyper_connection_expand, _fake_expand, _expand_inputs, EXPAND_TOLERANCE, _expand_cost),
    Op(NAME, "head", HEAD, hyper_connection_head, _fake_head, _head_inputs, TOLERANCE, _cost),
)
