"""Operators that write keys and values to a cache, as the vendor documents them. Caches change in place."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from porter.kernels.ascend.catalogue.attention_layouts import LATENT, ROPE
from porter.kernels.ascend.catalogue.cache import values_in_block
from porter.kernels.ascend.catalogue.vendor_op import Call
from porter.kernels.ascend.emulator.norm import normed
from porter.kernels.ascend.emulator.quantization import to_int8
from porter.kernels.ascend.emulator.rope import halves_of_pairs, turned_halves

Place = tuple[int, int, int]
"""A token of the call, and the block and the place in it where it goes."""


def npu_kv_rmsnorm_rope_cache(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The two caches, then what `npu_kv_rmsnorm_rope_cache_v2` gives."""
    return call["k_cache"], call["ckv_cache"], *npu_kv_rmsnorm_rope_cache_v2(call)


def npu_kv_rmsnorm_rope_cache_v2(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(turned keys [B, 1, S, 64], normalised latents [B, 1, S, 512]), undefined unless is_output_kv."""
    latent, rotary = call["kv"].float().split([LATENT, ROPE], dim=-1)
    turned = turned_halves(halves_of_pairs(rotary), call["cos"].float(), call["sin"].float())
    latent, _ = normed(latent, call["gamma"].float(), call["epsilon"])
    for states, cache, scale in (
        (turned, call["k_cache"], call["k_rope_scale"]),
        (latent, call["ckv_cache"], call["c_kv_scale"]),
    ):
        stored = states if scale is None else to_int8(states * scale)
        _store_latent(call, stored.reshape(-1, states.shape[-1]), cache)
    shown = [states.to(call["kv"].dtype) for states in (turned, latent)]
    if not call["is_output_kv"]:
        shown = [torch.full_like(states, torch.nan) for states in shown]
    return shown[0], shown[1]


def npu_scatter_pa_kv_cache(call: Call) -> None:
    """key and value [T, heads, D] to the slots of slot_mapping."""
    for states, cache in ((call["key"], call["key_cache"]), (call["value"], call["value_cache"])):
        tokens = states.flatten(1)
        if call["cache_mode"] == "PA_NZ":
            blocked, last = cache.view(len(cache), -1, cache.shape[-2], cache.shape[-1]), cache.shape[-1]
            for token, block, place in _places(call["slot_mapping"], cache.shape[-2]):
                blocked[block, :, place] = tokens[token].view(-1, last)
        else:
            for token, block, place in _places(call["slot_mapping"], cache.shape[1]):
                cache[block, place] = states[token]


def npu_qkv_rms_norm_rope_cache(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries normalised and turned by head to q_out; keys as well, and values, to the caches. Gives nothing."""
    (_, _, heads, head_dim), (queries, keys, values) = call["qkv_size"], call["head_nums"]
    states = call["qkv"].float().view(-1, heads, head_dim)
    query, key, value = states.split([queries, keys, values], dim=1)
    cos, sin = (call[name].float().unsqueeze(1) for name in ("cos", "sin"))
    query, key = (
        turned_halves(normed(x, call[gamma].float(), call["epsilon"])[0], cos, sin)
        for x, gamma in ((query, "q_gamma"), (key, "k_gamma"))
    )
    call["q_out"].copy_(query.flatten(1))
    for kind, x in (("k", key), ("v", value)):
        cache, scale, offset = (call[f"{kind}_{part}"] for part in ("cache", "scale", "offset"))
        stored = x if scale is None else to_int8(x / scale + (0.0 if offset is None else offset))
        for token, block, place in _places(call["index"], cache.shape[2]):
            cache[block, :, place] = stored[token].reshape(-1, cache.shape[-1])
    nothing: torch.Tensor = call["qkv"].new_empty(())
    return nothing, nothing.clone(), nothing.clone()


def _places(slots: torch.Tensor, block_size: int) -> Iterator[Place]:
    """Where each token goes; a token with a negative slot goes nowhere."""
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            yield token, slot // block_size, slot % block_size


def _block_places(index: torch.Tensor, length: int, block_size: int) -> Iterator[Place]:
    """As `_places` where index names the block of every block_size tokens of a batch row."""
    blocks = -(-length // block_size)
    for position, slot in enumerate(index.tolist()):
        batch, block = divmod(position, blocks)
        for place in range(min(block_size, length - block * block_size) if slot >= 0 else 0):
            yield batch * length + block * block_size + place, slot // block_size, place


def _store_latent(call: Call, tokens: torch.Tensor, cache: torch.Tensor) -> None:
    """tokens [B S, D] to a cache of npu_kv_rmsnorm_rope_cache, in its cache_mode."""
    mode, index, length = call["cache_mode"], call["index"], call["kv"].shape[2]
    if mode == "Norm":
        for token, batch, place in _norm_places(index):
            cache[batch, 0, place] = tokens[token]
        return
    blocks, block_size, _, head_dim = cache.shape
    places = _block_places(index, length, block_size) if "BLK" in mode else _places(index, block_size)
    last = values_in_block(cache)
    blocked = cache.view(blocks, head_dim // last, block_size, last)
    for token, block, place in places:
        if mode.endswith("NZ"):
            blocked[block, :, place] = tokens[token].view(-1, last)
        else:
            cache[block, place, 0] = tokens[token]


def _norm_places(index: torch.Tensor) -> Iterator[Place]:
    """As `_places` for index [B, S], whose slots are in the cache of their own batch row."""
    for batch, slots in enumerate(index.tolist()):
        for position, slot in enumerate(slots):
            if slot >= 0:
                yield batch * len(slots) + position, batch, slot


SEMANTICS = {
    "npu_kv_rmsnorm_rope_cache": npu_kv_rmsnorm_rope_cache,
    "npu_kv_rmsnorm_rope_cache_v2": npu_kv_rmsnorm_rope_cache_v2,
    "npu_scatter_pa_kv_cache": npu_scatter_pa_kv_cache,
    "npu_qkv_rms_norm_rope_cache": npu_qkv_rms_norm_rope_cache,
}
