"""Latent attention over selected keys: DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from porter.kernels.contract import Case, Cost, Op, Tolerance, compute_dtype, moved_bytes
from porter.kernels.reference.attention import mask_inputs, masked_softmax
from porter.kernels.reference.draw import Draw, spread
from porter.kernels.reference.indexer import visible_keys

TOLERANCE = Tolerance(
    "as mla_attention, with the K selected keys in the place of T",
    terms=lambda query_nope, query_rope, latent, key_rope, weight, indices, *rest: (
        64.0 * (query_nope.shape[-1] + 2 * (latent.shape[-1] + indices.shape[-1]))
    ),
    roundings=3.0,
)

GATHERED = 2**24
"""Values of latents held at once, so that a long prefill does not gather all of its keys."""


def sparse_mla_attention_absorbed(
    query_nope: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    kv_b_weight: torch.Tensor,
    indices: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """`mla_attention_absorbed` where query s attends to the keys indices[b, s] alone -> [B, S, H, V].

    indices [B, S, K] integers, distinct in each row; -1, and keys that the mask hides, are left out. No mask: causal,
    aligned to the end. A mask [B or 1, 1 or H, S, T] is bool or added to the scores. A query without any key gives
    zeros. Work and memory are in K, not in T.
    """
    dtype = compute_dtype(query_nope.dtype)
    batch, heads, queries, nope = query_nope.shape
    per_head = kv_b_weight.to(dtype).view(heads, -1, kv_b_weight.shape[-1])
    size = batch * indices.shape[-1] * (latent.shape[-1] + key_rope.shape[-1])
    rows = max(1, GATHERED // max(1, size))
    blocks = []
    for start in range(0, max(1, queries), rows):
        block = slice(start, start + rows)
        chosen = indices[:, block].long()
        keys, ropes = (_gather(t[:, 0], chosen.clamp_min(0)).to(dtype) for t in (latent, key_rope))
        absorbed = torch.einsum("bhsn,hnc->bshc", query_nope[:, :, block].to(dtype), per_head[:, :nope])
        turned = query_rope[:, :, block].transpose(1, 2).to(dtype)
        scores = absorbed @ keys.transpose(2, 3) + turned @ ropes.transpose(2, 3)
        mask = _selected_mask(chosen, attention_mask, queries, latent.shape[2], block, dtype)
        attended = masked_softmax(scores * scaling, mask) @ keys
        blocks.append(torch.einsum("bshc,hvc->bshv", attended, per_head[:, nope:]).to(query_nope.dtype))
    return torch.cat(blocks, dim=1).contiguous()


def _gather(states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """states [B, T, D] at indices [B, s, K] -> [B, s, K, D]."""
    batch = torch.arange(states.shape[0], device=states.device)[:, None, None]
    return states[batch, indices]


def _selected_mask(
    chosen: torch.Tensor,
    attention_mask: torch.Tensor | None,
    queries: int,
    keys: int,
    rows: slice,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Additive [B, s, 1 or H, K]: the mask at the chosen keys, -infinity where there is none."""
    batch, count, taken = chosen.shape
    visible = visible_keys(attention_mask, queries, keys, rows, chosen.device)
    visible = visible.unsqueeze(1) if visible.dim() == 3 else visible
    places = chosen.clamp_min(0)[:, None].expand(batch, visible.shape[1], count, taken)

    def at(mask: torch.Tensor) -> torch.Tensor:
        return mask.expand(batch, -1, -1, -1).gather(-1, places).transpose(1, 2)

    hidden = ~at(visible) | (chosen < 0)[:, :, None]
    if attention_mask is None or attention_mask.dtype == torch.bool:
        return torch.zeros(hidden.shape, dtype=dtype, device=chosen.device).masked_fill(hidden, -math.inf)
    return at(attention_mask[..., rows, :]).to(dtype).masked_fill(hidden, -math.inf)


def _fake(query_nope: torch.Tensor, query_rope: torch.Tensor, latent: torch.Tensor, *rest: object) -> torch.Tensor:
    weight = rest[1]
    assert isinstance(weight, torch.Tensor)
    batch, heads, queries, nope = query_nope.shape
    return query_nope.new_empty(batch, queries, heads, weight.shape[0] // heads - nope)


def _cost(
    query_nope: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    kv_b_weight: torch.Tensor,
    indices: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
) -> Cost:
    """Of the latents and of the mask, what the indices name: at most all of it."""
    batch, heads, queries, nope = query_nope.shape
    rank, rope, keys = latent.shape[-1], query_rope.shape[-1], latent.shape[2]
    value = kv_b_weight.shape[0] // heads - nope
    rows = batch * min(keys, queries * indices.shape[-1])
    entries = 0 if attention_mask is None else min(attention_mask.numel(), indices.numel())
    moved = moved_bytes(query_nope, query_rope, kv_b_weight, indices) + rows * (rank + rope) * latent.element_size()
    moved += batch * heads * queries * value * query_nope.element_size()
    moved += entries * (attention_mask.element_size() if attention_mask is not None else 0)
    attention = heads * indices.numel() * (2 * (2 * rank + rope) + 5)
    return Cost(moved, 2 * batch * heads * queries * rank * (nope + value) + attention)


SHAPES = (  # batch, heads, queries, keys, nope, rope, rank, value; selected
    ((1, 1, 1, 1, 1, 2, 1, 1), 1),
    ((2, 4, 5, 5, 16, 8, 32, 16), 3),
    ((1, 3, 1, 37, 17, 6, 31, 13), 7),
    ((2, 2, 3, 131, 32, 16, 64, 24), 67),
    ((1, 5, 1, 300, 128, 64, 512, 128), 129),
    ((1, 35, 2, 64, 16, 8, 32, 16), 64),
    ((1, 2, 67, 71, 16, 8, 32, 16), 5),
    ((0, 2, 3, 3, 16, 8, 32, 16), 2),
)


def _states(draw: Draw, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    batch, heads, queries, keys, nope, rope, rank, value = shape
    return (
        draw.normal(batch, heads, queries, nope),
        draw.normal(batch, heads, queries, rope),
        draw.normal(batch, 1, keys, rank),
        draw.normal(batch, 1, keys, rope),
        draw.normal(heads * (nope + value), rank, scale=rank**-0.5),
    )


def _choice(draw: Draw, batch: int, queries: int, keys: int, selected: int) -> torch.Tensor:
    """Any keys, hidden ones too; some are -1."""
    indices = draw.uniform(batch, queries, keys).argsort(-1)[..., :selected].to(torch.int32)
    return indices.masked_fill(draw.uniform(batch, queries, selected) < 0.2, -1)


def _inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 81)
    for shape, selected in SHAPES:
        indices = _choice(draw, shape[0], shape[2], shape[3], selected)
        scaling = float(shape[4] + shape[5]) ** -0.5
        yield Case(f"B, H, S, T, N, R, C, V = {shape}, K = {selected}", (*_states(draw, shape), indices, None, scaling))
    query_nope, query_rope, latent, key_rope, weight = _states(draw, (2, 4, 3, 64, 16, 8, 32, 16))
    fused = spread(torch.cat((query_nope, query_rope), dim=-1).transpose(1, 2)).transpose(1, 2)
    queries = torch.split(fused, [16, 8], dim=-1)
    indices = _choice(draw, 2, 3, 29, 11)
    cached = latent[:, :, :29], key_rope[:, :, :29]
    yield Case("29 latents of a cache of 64", (*queries, *cached, weight, spread(indices), None, 0.2))
    yield Case("indices in int64", (*queries, *cached, weight, indices.long(), None, 0.2))
    yield Case("nothing selected", (*queries, *cached, weight, torch.full_like(indices, -1), None, 0.2))
    # Large by their rotated part, which nobody rounds: scores of hundreds would make much of the rounding of absorbed
    # queries, which the tolerance allows.
    large = query_nope, query_rope * 200
    yield Case("scores of hundreds", (*large, latent, key_rope, weight, _choice(draw, 2, 3, 64, 11), None, 0.2))
    states = _states(draw, (2, 4, 5, 9, 16, 8, 32, 16))
    for case in mask_inputs(draw, states[0], states[2], states[2]):
        if not case.label.startswith("a mask beside a window"):
            yield Case(case.label, (*states, _choice(draw, 2, 5, 9, 6), case.arguments[3], 0.2))


SCHEMA = (
    "(Tensor query_nope, Tensor query_rope, Tensor latent, Tensor key_rope, Tensor kv_b_weight, Tensor indices, "
    "Tensor? attention_mask, float scaling) -> Tensor"
)

OPS = (
    Op("sparse_mla_attention", "absorbed", SCHEMA, sparse_mla_attention_absorbed, _fake, _inputs, TOLERANCE, _cost),
)
