"""The gated delta rule: linear attention whose state forgets, and corrects what a key already recalls."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from porter.kernels.contract import UNIT_ROUNDOFF, Case, Cost, Op, Tolerance, compute_dtype, moved_bytes
from porter.kernels.reference.draw import Draw, spread

CHUNK = 64
"""Tokens that the chunked form works on at a time. Any number gives the same result; 64 is upstream's."""

NORM_EPSILON = 1e-6
"""Added to the sum of squares of a query or key before its root, as upstream and flash-linear-attention do."""

TOLERANCE = Tolerance(
    "a step multiplies the state by exp(decay) (1 - beta k k^T), whose norm is at most 1, so errors of earlier steps "
    "do not grow: each adds those of two sums over the K key dimensions, relative to the head's state. The state stays "
    "in the compute dtype; the output is rounded once to its own",
    terms=lambda query, *rest: (query.shape[-1] + 64) * max(query.shape[1], 1),
)


def _normalised(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, T, Hk, K] -> unit rows [B, heads, T, K] in the compute dtype, each head repeated for its value heads."""
    x = x.to(compute_dtype(x.dtype))
    x = x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + NORM_EPSILON)
    return x.repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2)


def _by_head(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Queries, keys [B, Hv, T, K], values [B, Hv, T, V], decay, beta [B, Hv, T] and state, in the compute dtype."""
    batch, _, heads, size = value.shape
    dtype = compute_dtype(value.dtype)
    queries = _normalised(query, heads) * query.shape[-1] ** -0.5
    if state is None:
        state = value.new_zeros(batch, heads, query.shape[-1], size, dtype=dtype)
    rest = (x.to(dtype).transpose(1, 2) for x in (value, decay, beta))
    return queries, _normalised(key, heads), *rest, state.to(dtype)


def gated_delta_rule_recurrent(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query and key [B, T, Hk, K], value [B, T, Hv, V], decay and beta [B, T, Hv], state [B, Hv, K, V] or None (zeros)
    -> (output [B, T, Hv, V] in the dtype of value, next state in the compute dtype).

    Per head, with unit q (times K^-1/2) and k, and Hv / Hk value heads in a row sharing a key head:
    S <- exp(decay) S; S <- S + k (beta (v - S^T k))^T; output = S^T q (Yang et al. 2024, Gated Delta Networks, eq. 10).
    Equals transformers' torch_recurrent_gated_delta_rule with use_qk_l2norm_in_kernel.
    """
    queries, keys, values, decays, betas, state = _by_head(query, key, value, decay, beta, state)
    state = state.clone()
    outputs = torch.empty_like(values)
    for t in range(values.shape[2]):
        state = state * decays[:, :, t].exp()[..., None, None]
        recalled = torch.einsum("bhkv,bhk->bhv", state, keys[:, :, t])
        correction = (values[:, :, t] - recalled) * betas[:, :, t, None]
        state = state + keys[:, :, t].unsqueeze(-1) * correction.unsqueeze(-2)
        outputs[:, :, t] = torch.einsum("bhkv,bhk->bhv", state, queries[:, :, t])
    return outputs.transpose(1, 2).to(value.dtype).contiguous(), state


def gated_delta_rule_chunked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gated_delta_rule_recurrent` by matrix products over chunks of tokens.

    Within a chunk the corrections u solve (1 + A) u = beta (v - exp(d) S^T k), where d is the decay summed since the
    chunk began and A[i, j] = beta_i exp(d_i - d_j) k_i.k_j below the diagonal (the UT transform of Yang et al. 2024).
    """
    queries, keys, values, decays, betas, state = _by_head(query, key, value, decay, beta, state)
    state = state.clone()
    outputs = torch.empty_like(values)
    for start in range(0, values.shape[2], CHUNK):
        chunk = slice(start, start + CHUNK)
        q, k, v, strength = queries[:, :, chunk], keys[:, :, chunk], values[:, :, chunk], betas[:, :, chunk, None]
        since = decays[:, :, chunk].cumsum(-1)
        # Differences above the diagonal are positive and may overflow.
        between = (since.unsqueeze(-1) - since.unsqueeze(-2)).tril().exp().tril()
        system = strength * (k @ k.transpose(-1, -2)) * between
        kept = since.exp().unsqueeze(-1)
        corrections = torch.linalg.solve_triangular(
            system, strength * (v - kept * (k @ state)), upper=False, unitriangular=True
        )
        outputs[:, :, chunk] = kept * (q @ state) + ((q @ k.transpose(-1, -2)) * between) @ corrections
        to_end = (since[..., -1:] - since).exp().unsqueeze(-1)
        state = state * kept[:, :, -1:] + (k * to_end).transpose(-1, -2) @ corrections
    return outputs.transpose(1, 2).to(value.dtype).contiguous(), state


def _error(candidate: tuple[torch.Tensor, ...], oracle: tuple[torch.Tensor, ...], *arguments: torch.Tensor) -> float:
    """The largest relative L2 error of any head's outputs, or of its state on the scale of the outputs' bound.

    Heads, since the rows of a state mix; relative to the mean head at least, since a first output is proportional to
    q.k, which may cancel. The state is never rounded to 16 bits, so its error counts as much more.
    """
    bound = TOLERANCE.relative(candidate[0].dtype, *arguments)
    exact = math.sqrt(max(TOLERANCE.terms(*arguments), 1.0)) * UNIT_ROUNDOFF[compute_dtype(candidate[0].dtype)]
    of_state = _head_error(candidate[1], oracle[1], (2, 3))
    return max(_head_error(candidate[0], oracle[0], (1, 3)), of_state * bound / exact)


def _head_error(candidate: torch.Tensor, oracle: torch.Tensor, within: tuple[int, int]) -> float:
    if candidate.shape != oracle.shape or not bool(candidate.isfinite().all()):
        return math.inf
    if candidate.numel() == 0:
        return 0.0
    limits = torch.finfo(candidate.dtype)
    error = ((candidate.double() - oracle).abs() - limits.smallest_normal * limits.eps).clamp_min(0.0).norm(dim=within)
    norms = oracle.norm(dim=within)
    scale = norms.maximum(norms.square().mean(-1, keepdim=True).sqrt())
    return float(torch.where(error == 0, 0.0, error / scale).max())


def _exact(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence in float64: the oracle of the chunked form too."""
    wide = (None if a is None else a.double() for a in arguments)
    return gated_delta_rule_recurrent(*wide)


def _fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, _, heads, size = value.shape
    state = value.new_empty(batch, heads, key.shape[-1], size, dtype=compute_dtype(value.dtype))
    return value.new_empty(value.shape), state


def _cost(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
) -> Cost:
    """The state is written once, and read once where there is one; per token and head it is read for k and q and
    updated."""
    cells = value.shape[0] * value.shape[2] * key.shape[-1] * value.shape[-1]
    width = torch.finfo(compute_dtype(value.dtype)).bits // 8
    times = 1 if state is None else 2
    return Cost(moved_bytes(query, key, value, value, decay, beta) + times * cells * width, 6 * cells * value.shape[1])


SHAPES = (  # batch, tokens, key heads, value heads, K, V
    (1, 1, 1, 1, 1, 1),
    (1, 1, 2, 4, 128, 128),
    (3, 1, 2, 2, 7, 13),
    (2, 2, 1, 3, 16, 33),
    (1, 16, 2, 4, 24, 32),
    (2, 17, 2, 2, 13, 7),
    (1, 65, 1, 2, 64, 50),
    (1, 131, 1, 1, 32, 64),
    (0, 3, 1, 2, 8, 8),
    (2, 0, 1, 2, 8, 8),
)


def _inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 81)
    gate_dtype = compute_dtype(dtype)

    def gates(batch: int, tokens: int, heads: int, strength: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        decay = -strength * draw.uniform(batch, tokens, heads).to(gate_dtype)
        return decay, draw.uniform(batch, tokens, heads).to(gate_dtype)

    for batch, tokens, key_heads, heads, size, value_size in SHAPES:
        query, key = (draw.normal(batch, tokens, key_heads, size) for _ in range(2))
        value = draw.normal(batch, tokens, heads, value_size)
        state = draw.normal(batch, heads, size, value_size).to(gate_dtype)
        label = f"B={batch} T={tokens} Hk={key_heads} Hv={heads} K={size} V={value_size}"
        yield Case(label, (query, key, value, *gates(batch, tokens, heads), None))
        yield Case(f"{label} state", (query, key, value, *gates(batch, tokens, heads, 0.1), state))
    query, key, value = draw.normal(2, 37, 2, 16), draw.normal(2, 37, 2, 16), draw.normal(2, 37, 4, 24)
    decay, beta = gates(2, 37, 4)
    state = draw.normal(2, 4, 16, 24).to(gate_dtype)
    yield Case("keeps everything", (query, key, value, decay * 0, beta * 0 + 1, state))
    yield Case("forgets everything", (query, key, value, decay - 200, beta, state))
    yield Case("writes nothing", (query, key, value, decay * 0.01, beta * 0, state))
    yield Case("beta up to 2", (query, key, value, decay * 0.1, beta * 2, state))
    yield Case("one key throughout", (query, key[:, :1].expand(-1, 37, -1, -1), value, decay * 0.1, beta, state))
    yield Case("zero queries and keys", (query * 0, key * 0, value, decay, beta, state))
    yield Case("1e-4 keys, 1e4 values", (query * 1e4, key * 1e-4, value * 1e4, decay, beta, None))
    yield Case("rows apart", (spread(query), spread(key), spread(value), decay, beta, state))
    mixed = draw.normal(2, 37, 2 * 32 + 96)
    parts = mixed.split((32, 32, 96), dim=-1)
    views = (parts[0].view(2, 37, 2, 16), parts[1].view(2, 37, 2, 16), parts[2].view(2, 37, 4, 24))
    yield Case("views of a convolution", (*views, decay, beta, state))


SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, Tensor? state) -> (Tensor, Tensor)"
)

OPS = tuple(
    Op("gated_delta_rule", variant, SCHEMA, reference, _fake, _inputs, TOLERANCE, _cost, error=_error, exact=_exact)
    for variant, reference in (("chunked", gated_delta_rule_chunked), ("recurrent", gated_delta_rule_recurrent))
)
