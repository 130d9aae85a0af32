"""Rotary position embeddings (Su et al. 2021) applied to queries and keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from porter.kernels.contract import Case, Cost, Op, Tolerance, compute_dtype, moved_bytes
from porter.kernels.reference.draw import Draw, strided

TOLERANCE = Tolerance(
    "two products and one sum per value, relative to the length of the row, which a rotation keeps; one rounding to "
    "the output dtype",
    terms=lambda *arguments: 16,
)


def _rotate_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    dtype, rotary = compute_dtype(x.dtype), cos.shape[-1]
    cos, sin = cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)
    turned, passed = x[..., :rotary].to(dtype), x[..., rotary:]
    first, second = turned.chunk(2, dim=-1)
    rotated = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated.to(x.dtype), passed), dim=-1)


def _rotate_interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    halves = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    return _rotate_half(halves, cos, sin)


def rope_half(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [B, Hq, S, D] and key [B, Hk, S, D] turned by cos and sin [B or 1, S, R], the pairs being R/2 apart.

    R <= D; dimensions past R pass through. Equals transformers' `apply_rotary_pos_emb`.
    """
    return _rotate_half(query, cos, sin), _rotate_half(key, cos, sin)


def rope_interleaved(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `rope_half` for pairs that are neighbours: (x0, x1), (x2, x3), ... in, halves out, and R = D.

    Equals transformers' `apply_rotary_pos_emb_interleave` (DeepSeek-V3).
    """
    return _rotate_interleaved(query, cos, sin), _rotate_interleaved(key, cos, sin)


def rope_complex(
    query: torch.Tensor, key: torch.Tensor, angles: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [B, Hq, S, D] and key [B, Hk, S, D], neighbours (x0, x1), (x2, x3), ... as complex numbers, times the
    complex `angles` [B or 1, S, D/2]; neighbours stay neighbours.

    Equals transformers' `apply_rotary_emb` of DeepSeek-V2.
    """
    turn = torch.view_as_real(angles.resolve_conj()).unsqueeze(1)
    return _rotate_neighbours(query, turn), _rotate_neighbours(key, turn)


def _rotate_neighbours(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    dtype = compute_dtype(x.dtype)
    cos, sin = turn.to(dtype).unbind(-1)
    real, imaginary = x[..., 0::2].to(dtype), x[..., 1::2].to(dtype)
    turned = torch.stack((real * cos - imaginary * sin, imaginary * cos + real * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def rope_trailing(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """states [B, H, S, D] with the last R dimensions turned as neighbours (x0, x1), (x2, x3), ..., which stay so; cos
    and sin [B or 1, S, R/2], one for each pair.

    Equals transformers' `apply_rotary_pos_emb` of DeepSeek-V4.
    """
    passed = states.shape[-1] - 2 * cos.shape[-1]
    turned = _rotate_neighbours(states[..., passed:], torch.stack((cos, sin), dim=-1).unsqueeze(1))
    return torch.cat((states[..., :passed], turned), dim=-1)


def _trailing_fake(states: torch.Tensor, *rest: object) -> torch.Tensor:
    return states.new_empty(states.shape)


def _trailing_cost(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Cost:
    turned = states.shape[0] * states.shape[1] * states.shape[2] * cos.shape[-1]
    return Cost(moved_bytes(states, states, cos, sin), 6 * turned)


def _fake(query: torch.Tensor, key: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


def _cost(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Cost:
    heads = query.shape[1] + key.shape[1]
    turned = query.shape[0] * heads * query.shape[2] * cos.shape[-1]
    return Cost(moved_bytes(query, query, key, key, cos, sin), 3 * turned)


def _complex_cost(query: torch.Tensor, key: torch.Tensor, angles: torch.Tensor) -> Cost:
    return Cost(moved_bytes(query, query, key, key, angles), 3 * (query.numel() + key.numel()))


def _angles(draw: Draw, batch: int, length: int, rotary: int) -> tuple[torch.Tensor, torch.Tensor]:
    position = draw.integers(0, 5000, batch, length, 1).float()
    frequencies = position * 10000.0 ** (-torch.arange(0, rotary, 2).float() / rotary)
    angles = torch.cat((frequencies, frequencies), dim=-1)
    return angles.cos().to(draw.dtype), angles.sin().to(draw.dtype)


SHAPES = (  # batch, query heads, key heads, length, head_dim, rotary, batch of cos
    (1, 1, 1, 1, 2, 2, 1),
    (2, 4, 2, 5, 16, 16, 2),
    (2, 4, 1, 7, 64, 64, 1),
    (1, 16, 8, 1, 128, 128, 1),
    (3, 5, 1, 11, 34, 34, 3),
    (0, 4, 2, 3, 16, 16, 0),
    (2, 3, 3, 0, 16, 16, 2),
)
PARTIAL = ((2, 4, 2, 5, 16, 4, 2), (1, 3, 1, 7, 64, 16, 1), (2, 2, 2, 3, 10, 6, 1))


def _inputs(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 41)
    for batch, query_heads, key_heads, length, dim, rotary, angles in shapes:
        cos_sin = _angles(draw, angles, length, rotary)
        query, key = (draw.normal(batch, length, heads, dim).transpose(1, 2) for heads in (query_heads, key_heads))
        label = f"B={batch} Hq={query_heads} Hk={key_heads} S={length} D={dim} R={rotary} cos batch={angles}"
        yield Case(f"{label} transposed", (query, key, *cos_sin))
        yield Case(f"{label} contiguous", (query.contiguous(), key.contiguous(), *cos_sin))
    cos_sin = _angles(draw, 2, 3, 16)
    query, key = draw.normal(2, 4, 3, 16), draw.normal(2, 2, 3, 16)
    yield Case("last dimension strided", (strided(query), strided(key), *cos_sin))
    yield Case("1e4 and 1e-4", (query * 1e4, key * 1e-4, *cos_sin))
    fused = torch.split(draw.normal(2, 3, 6 * 16), [4 * 16, 2 * 16], dim=-1)
    views = tuple(part.view(2, 3, -1, 16).transpose(1, 2) for part in fused)
    yield Case("views of a fused projection", (*views, *cos_sin))


def _half_inputs(dtype: torch.dtype) -> Iterator[Case]:
    yield from _inputs(SHAPES + PARTIAL, dtype)


def _interleaved_inputs(dtype: torch.dtype) -> Iterator[Case]:
    yield from _inputs(SHAPES, dtype)


def _complex_inputs(dtype: torch.dtype) -> Iterator[Case]:
    for case in _inputs(SHAPES, dtype):
        query, key, cos, sin = case.arguments
        half = cos.shape[-1] // 2
        # Angles are float32 whatever the activations are, and yarn may make them longer or shorter than 1.
        parts = [1.25 * part[..., :half].to(compute_dtype(dtype)) for part in (cos, sin)]
        yield Case(case.label, (query, key, torch.complex(*parts)))


def _trailing_inputs(dtype: torch.dtype) -> Iterator[Case]:
    for case in _inputs(SHAPES + PARTIAL, dtype):
        query, _, cos, sin = case.arguments
        half = cos.shape[-1] // 2
        for wide in dict.fromkeys((dtype, compute_dtype(dtype))):
            angles = tuple(part[..., :half].to(wide) for part in (cos, -sin))
            yield Case(f"{case.label}, angles in {wide}", (query, *angles))
    draw = Draw(dtype, 42)
    cos, sin = _angles(draw, 2, 3, 8)
    flat = draw.normal(2, 3, 5, 24).transpose(1, 2)
    yield Case("cosines of a longer array", (flat, cos[..., :4], sin[..., :4]))


SCHEMA = "(Tensor query, Tensor key, Tensor cos, Tensor sin) -> (Tensor, Tensor)"
COMPLEX_SCHEMA = "(Tensor query, Tensor key, Tensor angles) -> (Tensor, Tensor)"

TRAILING_SCHEMA = "(Tensor states, Tensor cos, Tensor sin) -> Tensor"

OPS = (
    Op("rope", "half", SCHEMA, rope_half, _fake, _half_inputs, TOLERANCE, _cost),
    Op("rope", "interleaved", SCHEMA, rope_interleaved, _fake, _interleaved_inputs, TOLERANCE, _cost),
    Op("rope", "complex", COMPLEX_SCHEMA, rope_complex, _fake, _complex_inputs, TOLERANCE, _complex_cost),
    Op(
        "rope",
        "trailing",
        TRAILING_SCHEMA,
        rope_trailing,
        _trailing_fake,
        _trailing_inputs,
        TOLERANCE,
        _trailing_cost,
    ),
)
