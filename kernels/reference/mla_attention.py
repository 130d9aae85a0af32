"""DeepSeek's multi-head latent attention over the compressed cache (DeepSeek-V2, section 2.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from porter.kernels.contract import Case, Cost, Op, Tolerance, compute_dtype, moved_bytes
from porter.kernels.reference.attention import attended_pairs, causal_mask, mask_inputs, masked_softmax, query_blocks
from porter.kernels.reference.draw import Draw, spread

TOLERANCE = Tolerance(
    "as attention, with one more product over the C latent dimensions on either side; an implementation may round the "
    "expanded keys, or the absorbed query and its output over the latents, to the activation dtype as upstream does",
    terms=lambda query_nope, query_rope, latent, *rest: 64.0 * (query_nope.shape[-1] + 2 * sum(latent.shape[2:])),
    roundings=3.0,
)


def _split(kv_b_weight: torch.Tensor, heads: int, nope: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(key rows [H, N, C], value rows [H, V, C])."""
    per_head = kv_b_weight.view(heads, -1, kv_b_weight.shape[-1])
    return per_head[:, :nope], per_head[:, nope:]


def _in_blocks(
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    query_nope: torch.Tensor,
    query_rope: torch.Tensor,
    keys: int,
    attention_mask: torch.Tensor | None,
) -> torch.Tensor:
    """[B, S, H, V] from `attend` on blocks of the queries, in the compute dtype, with their rows of the mask."""
    dtype = compute_dtype(query_nope.dtype)
    if attention_mask is None:
        attention_mask = causal_mask(query_nope.shape[2], keys, None, query_nope.device)
    blocks = [
        attend(query_nope[:, :, rows].to(dtype), query_rope[:, :, rows].to(dtype), attention_mask[..., rows, :])
        for rows in query_blocks(query_nope, keys)
    ]
    return torch.cat(blocks, dim=1).to(query_nope.dtype).contiguous()


def mla_attention_absorbed(
    query_nope: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    kv_b_weight: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """query_nope [B, H, S, N], query_rope [B, H, S, R], latent [B, 1, T, C], key_rope [B, 1, T, R], kv_b_weight
    [H * (N + V), C] with N key rows then V value rows per head -> [B, S, H, V]. Masks as in `attention_gqa`.

    Turns each query into the latent space, attends over the latents, and turns the result into values: C
    multiplications per key and head, and no keys or values are ever expanded.
    """
    dtype = compute_dtype(query_nope.dtype)
    key_rows, value_rows = _split(kv_b_weight.to(dtype), query_nope.shape[1], query_nope.shape[-1])
    latent, key_rope = latent.to(dtype), key_rope.to(dtype)

    def attend(nope: torch.Tensor, rope: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        absorbed = torch.einsum("bhsn,hnc->bhsc", nope, key_rows)
        scores = absorbed @ latent.transpose(2, 3) + rope @ key_rope.transpose(2, 3)
        attended = masked_softmax(scores * scaling, mask) @ latent
        return torch.einsum("bhsc,hvc->bshv", attended, value_rows)

    return _in_blocks(attend, query_nope, query_rope, latent.shape[2], attention_mask)


def mla_attention_expanded(
    query_nope: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    kv_b_weight: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """The same result as `mla_attention_absorbed`: expands each latent to H keys and values, then attends as usual,
    N + R multiplications per key and head."""
    dtype = compute_dtype(query_nope.dtype)
    key_rows, value_rows = _split(kv_b_weight.to(dtype), query_nope.shape[1], query_nope.shape[-1])
    latent, key_rope = latent.to(dtype), key_rope.to(dtype)
    keys = torch.einsum("btc,hnc->bhtn", latent[:, 0], key_rows)
    values = torch.einsum("btc,hvc->bhtv", latent[:, 0], value_rows)

    def attend(nope: torch.Tensor, rope: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = nope @ keys.transpose(2, 3) + rope @ key_rope.transpose(2, 3)
        return (masked_softmax(scores * scaling, mask) @ values).transpose(1, 2)

    return _in_blocks(attend, query_nope, query_rope, latent.shape[2], attention_mask)


def _value_dim(query_nope: torch.Tensor, kv_b_weight: torch.Tensor) -> int:
    return kv_b_weight.shape[0] // query_nope.shape[1] - query_nope.shape[-1]


def _fake(
    query_nope: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    kv_b_weight: torch.Tensor,
    *rest: object,
) -> torch.Tensor:
    batch, heads, queries, _ = query_nope.shape
    return query_nope.new_empty(batch, queries, heads, _value_dim(query_nope, kv_b_weight))


def _pairs(query_nope: torch.Tensor, latent: torch.Tensor, attention_mask: torch.Tensor | None) -> int:
    queries, keys = query_nope.shape[2], latent.shape[2]
    per_head = queries * keys if attention_mask is not None else attended_pairs(queries, keys, None)
    return query_nope.shape[0] * query_nope.shape[1] * per_head


def _moved(query_nope: torch.Tensor, kv_b_weight: torch.Tensor, *rest: object) -> int:
    values = query_nope.shape[:-1].numel() * _value_dim(query_nope, kv_b_weight)
    return moved_bytes(query_nope, kv_b_weight, *rest) + values * query_nope.element_size()


def _absorbed_cost(
    query_nope: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    kv_b_weight: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
) -> Cost:
    rank, rope = latent.shape[-1], query_rope.shape[-1]
    per_query = rank * (query_nope.shape[-1] + _value_dim(query_nope, kv_b_weight))
    attention = _pairs(query_nope, latent, attention_mask) * (2 * (2 * rank + rope) + 5)
    moved = _moved(query_nope, kv_b_weight, query_rope, latent, key_rope, attention_mask)
    return Cost(moved, 2 * query_nope.shape[:-1].numel() * per_query + attention)


def _expanded_cost(
    query_nope: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    kv_b_weight: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
) -> Cost:
    expansion = 2 * latent.shape[0] * latent.shape[2] * kv_b_weight.numel()
    dims = query_nope.shape[-1] + query_rope.shape[-1] + _value_dim(query_nope, kv_b_weight)
    attention = _pairs(query_nope, latent, attention_mask) * (2 * dims + 5)
    moved = _moved(query_nope, kv_b_weight, query_rope, latent, key_rope, attention_mask)
    return Cost(moved, expansion + attention)


SHAPES = (  # batch, heads, queries, keys, nope, rope, rank, value
    (1, 1, 1, 1, 1, 2, 1, 1),
    (2, 4, 5, 5, 16, 8, 32, 16),
    (1, 3, 1, 37, 17, 6, 31, 13),
    (2, 2, 3, 11, 32, 16, 64, 24),
    (1, 4, 1, 131, 128, 64, 512, 128),
    (0, 2, 3, 3, 16, 8, 32, 16),
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


def _inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 61)
    for shape in SHAPES:
        states = _states(draw, shape)
        scaling = float(shape[4] + shape[5]) ** -0.5
        yield Case(f"B, H, S, T, N, R, C, V = {shape}", (*states, None, scaling))
    query_nope, query_rope, latent, key_rope, weight = _states(draw, (2, 4, 3, 64, 16, 8, 32, 16))
    fused = spread(torch.cat((query_nope, query_rope), dim=-1).transpose(1, 2)).transpose(1, 2)
    queries = torch.split(fused, [16, 8], dim=-1)
    for length in (3, 29):
        cached = latent[:, :, :length], key_rope[:, :, :length]
        yield Case(f"{length} latents of a cache of 64", (*queries, *cached, weight, None, 0.2))
    states = _states(draw, (2, 4, 5, 9, 16, 8, 32, 16))
    for case in mask_inputs(draw, states[0], states[2], states[2]):
        if not case.label.startswith("a mask beside a window"):
            yield Case(case.label, (*states, case.arguments[3], 0.2))


SCHEMA = (
    "(Tensor query_nope, Tensor query_rope, Tensor latent, Tensor key_rope, Tensor kv_b_weight, "
    "Tensor? attention_mask, float scaling) -> Tensor"
)

OPS = (
    Op("mla_attention", "absorbed", SCHEMA, mla_attention_absorbed, _fake, _inputs, TOLERANCE, _absorbed_cost),
    Op("mla_attention", "expanded", SCHEMA, mla_attention_expanded, _fake, _inputs, TOLERANCE, _expanded_cost),
)
