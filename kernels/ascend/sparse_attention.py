"""DeepSeek's lightning indexer and sparse latent attention by torch_npu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from porter.kernels.ascend.attention_masks import whole_cache
from porter.kernels.ascend.catalogue.attention_layouts import LATENT, ROPE
from porter.kernels.ascend.catalogue.vendor_op import VendorRefusal

INDEX_DIM = 128
"""With LATENT and ROPE the sizes that the vendor's operators are made for, DeepSeek-V3.2's. Smaller ones are filled up
with zeros, which add nothing to a dot product; at these sizes nothing is copied."""


def indexer(
    torch_npu: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    top_k: int,
) -> torch.Tensor:
    """npu_lightning_indexer. It has no scale, and a positive one changes no order."""
    _without_mask("indexer", attention_mask)
    if not scaling > 0:
        raise VendorRefusal(
            f"the indexer needs a scaling above zero, which npu_lightning_indexer leaves out: {scaling}"
        )
    taken = min(top_k, key.shape[1])
    (keys,), held = _cached(key.unsqueeze(1))
    indices: torch.Tensor = torch_npu.npu_lightning_indexer(
        _filled(query, INDEX_DIM).contiguous(),
        _filled(keys.transpose(1, 2), INDEX_DIM),
        weights.contiguous(),
        actual_seq_lengths_key=held,
        layout_query="BSND",
        layout_key="BSND",
        sparse_count=taken,
        sparse_mode=3,
        return_value=False,
    )[0].squeeze(2)
    if query.shape[1] == 1:
        return indices
    # A row ends in -1 when its query sees fewer keys than are taken. These are then the first keys, and all of them
    # are named, so that the hidden key at each place's own number stands nowhere else.
    return torch.where(indices < 0, torch.arange(taken, dtype=indices.dtype, device=indices.device), indices)


def sparse_mla_attention(
    torch_npu: Any,
    query_nope: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    kv_b_weight: torch.Tensor,
    indices: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """npu_sparse_flash_attention on absorbed queries. Heads are filled up to a power of two, which real models have."""
    _without_mask("sparse attention", attention_mask)
    batch, heads, queries, nope = query_nope.shape
    rank, keys = latent.shape[-1], latent.shape[2]
    per_head = kv_b_weight.view(heads, -1, rank)
    width = 1 << (heads - 1).bit_length()
    by_head = query_nope.transpose(0, 1).reshape(heads, -1, nope)
    absorbed = torch.bmm(by_head, per_head[:, :nope]).transpose(0, 1).reshape(batch, queries, heads, rank)
    (latent, key_rope), held = _cached(latent, key_rope)
    latents = _filled(latent.transpose(1, 2), LATENT)
    attended: torch.Tensor = torch_npu.npu_sparse_flash_attention(
        _filled(absorbed, LATENT, width).contiguous(),
        latents,
        latents,
        _visible_first(indices, queries, keys).unsqueeze(2),
        scaling,
        actual_seq_lengths_kv=held,
        query_rope=_filled(query_rope.transpose(1, 2), ROPE, width).contiguous(),
        key_rope=_filled(key_rope.transpose(1, 2), ROPE),
        sparse_block_size=1,
        layout_query="BSND",
        layout_kv="BSND",
        sparse_mode=3,
        attention_mode=2,
        return_softmax_lse=False,
    )[0]
    attended = attended[..., :heads, :rank].reshape(-1, heads, rank).transpose(0, 1)
    values = torch.bmm(attended, per_head[:, nope:].transpose(1, 2))
    return values.transpose(0, 1).reshape(batch, queries, heads, values.shape[-1])


def _without_mask(what: str, attention_mask: torch.Tensor | None) -> None:
    if attention_mask is not None:
        raise VendorRefusal(f"torch_npu's {what} takes no mask: causal alone, aligned to the end")


def _cached(*states: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """(the tensors [B, 1, T, D], None), or where they are the first T rows of longer buffers these buffers, and T for
    each sequence: reading a buffer up to a length spares a copy of the cache at every token."""
    buffers = None if all(s.is_contiguous() for s in states) else whole_cache(*states)
    if buffers is None:
        return list(states), None
    batch, _, keys, _ = states[0].shape
    return buffers, torch.full((batch,), keys, dtype=torch.int32, device=states[0].device)


def _filled(states: torch.Tensor, size: int, heads: int | None = None) -> torch.Tensor:
    """`states` with zeros up to `size` in the last dimension and `heads` in the one before; itself where it is so."""
    missing = max(0, size - states.shape[-1])
    beside = 0 if heads is None else heads - states.shape[-2]
    return torch.nn.functional.pad(states, (0, missing, 0, beside)) if missing or beside else states


def _visible_first(indices: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    """Int32 `indices` with the keys that each query sees at the start of its row, in order, and -1 for all others.

    The chip stops at -1 and reads no more entries than a query sees keys. Sorted as float32, which the chip's vector
    units do, and which is exact below 2^24 keys.
    """
    hidden = indices < 0
    if queries > 1:
        last = torch.arange(keys - queries, keys, dtype=indices.dtype, device=indices.device)
        hidden = hidden | (indices > last[:, None])
    ordered = indices.masked_fill(hidden, keys).float().sort(dim=-1).values
    return ordered.masked_fill(ordered == keys, -1.0).to(torch.int32)


KERNELS: dict[tuple[str, str], Callable[..., Any]] = {
    ("indexer", "lightning"): indexer,
    ("sparse_mla_attention", "absorbed"): sparse_mla_attention,
}
