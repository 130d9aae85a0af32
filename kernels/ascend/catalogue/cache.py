"""Writing keys and values to a cache, alone or fused with the norm and rotation before it."""

from __future__ import annotations

from math import ceil
from typing import Any

import torch

from porter.kernels.ascend.catalogue.attention_layouts import LATENT, ROPE
from porter.kernels.ascend.catalogue.rules import absent, contiguous, dtypes, not_empty, one_of, that
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, PAGES, Call, Rule, VendorOp

BLOCK = 32
"""Bytes of the vendor's smallest unit of memory: 16 values of 16 bits, 32 of 8."""
PAGED = ("PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ")


def values_in_block(tensor: torch.Tensor) -> int:
    """How many values of the tensor's dtype fill a block."""
    return BLOCK // tensor.element_size()


def unique_slots(slots: torch.Tensor, count: int, lowest: int) -> bool:
    """Every slot is in [lowest, count), and no two that are not negative are the same."""
    written = slots[slots >= 0]
    return bool(((slots >= lowest) & (slots < count)).all()) and written.unique().numel() == written.numel()


def _kv_shapes(call: Call) -> bool:
    batch, heads, length, hidden = call["kv"].shape if call["kv"].dim() == 4 else (0, 0, 0, 0)
    angles = (batch, 1, length, ROPE)
    fits = heads == 1 and hidden == LATENT + ROPE and tuple(call["gamma"].shape) == (LATENT,)
    return fits and tuple(call["cos"].shape) == tuple(call["sin"].shape) == angles


def _kv_caches(call: Call) -> bool:
    batch, _, length, _ = call["kv"].shape
    k_cache, ckv_cache, index = (tuple(call[name].shape) for name in ("k_cache", "ckv_cache", "index"))
    if len(k_cache) != 4 or k_cache[:3] != ckv_cache[:3] or (k_cache[3], ckv_cache[3]) != (ROPE, LATENT):
        return False
    if call["cache_mode"] == "Norm":
        return k_cache[:2] == (batch, 1) and k_cache[2] >= length and index == (batch, length)
    blocks, block_size, heads, _ = k_cache
    needed = ceil(length / block_size) if block_size else blocks + 1
    return (
        heads == 1
        and blocks >= needed * batch
        and all(block_size % values_in_block(call[name]) == 0 for name in ("k_cache", "ckv_cache"))
        and index == (batch * (needed if "BLK" in call["cache_mode"] else length),)
    )


def _kv_quantized(call: Call) -> bool:
    """int8 caches with both scales outside Norm, or caches as kv without either."""
    scales, caches = (call["k_rope_scale"], call["c_kv_scale"]), (call["k_cache"], call["ckv_cache"])
    if all(scale is None for scale in scales):
        return all(cache.dtype == call["kv"].dtype for cache in caches)
    if any(scale is None for scale in scales) or call["cache_mode"] == "Norm":
        return False
    sizes = [(scale.dtype, tuple(scale.shape)) for scale in scales]
    return all(cache.dtype == torch.int8 for cache in caches) and sizes == [
        (torch.float32, (ROPE,)),
        (torch.float32, (LATENT,)),
    ]


def _kv_slots(call: Call) -> bool:
    k_cache, index = call["k_cache"], call["index"]
    if call["cache_mode"] == "Norm":
        return all(unique_slots(row, k_cache.shape[2], -1) for row in index)
    block_size = k_cache.shape[1]
    if "BLK" in call["cache_mode"]:
        return unique_slots(torch.div(index, block_size, rounding_mode="floor"), k_cache.shape[0], -1)
    return unique_slots(index, k_cache.shape[0] * block_size, -1)


def _kv_outputs(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    shape = call["kv"].shape[:3]
    return call["kv"].new_empty((*shape, ROPE)), call["kv"].new_empty((*shape, LATENT))


KV_ARGUMENTS = (
    "Tensor? k_rope_scale=None, Tensor? c_kv_scale=None, Tensor? k_rope_offset=None, Tensor? c_kv_offset=None, "
    'Tensor? v=None, float epsilon=1e-05, str cache_mode="Norm", bool is_output_kv=False'
)
KV_RULES = (
    dtypes("kv gamma cos sin", "f16/f16/f16/f16 bf16/bf16/bf16/bf16"),
    dtypes("index", "i64"),
    that(
        f"kv [B, 1, S, {LATENT + ROPE}], gamma [{LATENT}], cos and sin [B, 1, S, {ROPE}]",
        _kv_shapes,
        "kv",
        "gamma",
        "cos",
        "sin",
    ),
    one_of("cache_mode", "Norm", *PAGED),
    absent("v"),
    absent("k_rope_offset", "c_kv_offset", why="the vendor does not support"),
    that(
        "caches of the dtype of kv, or of int8 with both float32 scales and another cache_mode than Norm",
        _kv_quantized,
        "k_cache",
        "ckv_cache",
        "k_rope_scale",
        "c_kv_scale",
        "cache_mode",
    ),
    that(
        f"caches [B, 1, length, D] and index [B, S] for Norm; else [blocks, block_size, 1, D], D {ROPE} or {LATENT}, "
        "32 bytes dividing block_size values, enough blocks, and index [B S], or [B ceil(S / block_size)] for PA_BLK",
        _kv_caches,
        "kv",
        "k_cache",
        "ckv_cache",
        "index",
        "cache_mode",
    ),
    that(
        "is_output_kv False for Norm, which gives no outputs",
        lambda call: not (call["is_output_kv"] and call["cache_mode"] == "Norm"),
        "is_output_kv",
        "cache_mode",
    ),
    contiguous("k_cache", "ckv_cache"),
    not_empty("kv", "index", "k_cache"),
)
KV_VALUES = (that("slots in index that are in the cache, or -1 to skip, none twice", _kv_slots, "index", "k_cache"),)
KV_NOTE = (
    "the norm of the first 512 values goes to ckv_cache, the last 64, neighbours in and halves out, to k_cache, both "
    "in place; the two dense results are undefined unless is_output_kv; PA_NZ fills blocks as [D / 16, tokens, 16], "
    "or 32 for int8, under the plain shape"
)


def _slots_of(call: Call) -> tuple[int, int] | None:
    """(blocks, tokens in a block) of npu_scatter_pa_kv_cache's caches, or None where their shapes do not fit."""
    found = set()
    for states, cache in ((call["key"], call["key_cache"]), (call["value"], call["value_cache"])):
        _, heads, head_dim = states.shape
        shape, last = tuple(cache.shape), values_in_block(cache)
        if call["cache_mode"] == "PA_NZ":
            flat = (heads * head_dim // last, last)
            split = (heads, head_dim // last, last)
            fits = (*shape[1:-2], shape[-1]) in (flat, split) and head_dim * heads % last == 0
            found.add((shape[0], shape[-2]) if fits else None)
        else:
            found.add(shape[:2] if len(shape) == 4 and shape[2:] == (heads, head_dim) else None)
    return found.pop() if len(found) == 1 else None


def _scattered_shapes(call: Call) -> bool:
    key, value, slots = (tuple(call[name].shape) for name in ("key", "value", "slot_mapping"))
    return len(key) == len(value) == 3 and key[:2] == value[:2] and slots == key[:1]


def _scattered_slots(call: Call) -> bool:
    blocks, block_size = _slots_of(call) or (0, 0)
    return unique_slots(call["slot_mapping"], blocks * block_size, 0)


SCATTERED = ("key", "value", "key_cache", "value_cache")


def _caches_rule() -> Rule:
    return that(
        "caches [blocks, block_size, heads, D], or for PA_NZ [blocks, heads D / c, block_size, c], c filling 32 bytes",
        lambda call: _slots_of(call) is not None,
        *SCATTERED,
        "cache_mode",
    )


def _nothing(call: Call) -> Any:
    return None


OPS = (
    VendorOp(
        name="npu_kv_rmsnorm_rope_cache",
        schema="(Tensor kv, Tensor gamma, Tensor cos, Tensor sin, Tensor index, Tensor k_cache, Tensor ckv_cache, *, "
        f"{KV_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
        page=PAGES + "torch_npu-npu_kv_rmsnorm_rope_cache.md; ascend-950 and details: CANN ops-transformer "
        "posembedding/kv_rms_norm_rope_cache/README.md",
        chips=(A2, A3, A5),
        outputs=lambda call: (
            torch.empty_like(call["k_cache"]),
            torch.empty_like(call["ckv_cache"]),
            *_kv_outputs(call),
        ),
        rules=KV_RULES,
        value_rules=KV_VALUES,
        explicit=("epsilon", "cache_mode"),
        note=KV_NOTE + "; its schema does not say that it changes the caches",
    ),
    VendorOp(
        name="npu_kv_rmsnorm_rope_cache_v2",
        schema="(Tensor kv, Tensor gamma, Tensor cos, Tensor sin, Tensor index, Tensor(a!) k_cache, "
        f"Tensor(b!) ckv_cache, *, {KV_ARGUMENTS}, int? k_cache_dtype=None, int? ckv_cache_dtype=None) -> "
        "(Tensor, Tensor)",
        page="as npu_kv_rmsnorm_rope_cache; op-plugin op_plugin/ops/opapi/KvRmsNormRopeCacheNpuOpApi.cpp",
        chips=(A2, A3, A5),
        outputs=_kv_outputs,
        rules=(*KV_RULES, absent("k_cache_dtype", "ckv_cache_dtype")),
        value_rules=KV_VALUES,
        explicit=("epsilon", "cache_mode"),
        note=KV_NOTE,
    ),
    VendorOp(
        name="npu_scatter_pa_kv_cache",
        schema="(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, *, "
        "Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, Tensor? seq_lens=None, "
        'str? cache_mode="PA_NZ") -> ()',
        page=PAGES + "torch_npu-npu_scatter_pa_kv_cache.md; ascend-950 and dtypes: CANN ops-transformer "
        "aclnnScatterPaKvCache.md",
        chips=(A2, A3, A5),
        outputs=_nothing,
        rules=(
            dtypes(" ".join(SCATTERED), "f16/f16/f16/f16 bf16/bf16/bf16/bf16 i8/i8/i8/i8"),
            dtypes("slot_mapping", "i32 i64"),
            one_of("cache_mode", None, "Norm", "PA_NZ"),
            absent("compress_lens", "compress_seq_offsets", "seq_lens"),
            that("key [T, heads, D], value [T, heads, Dv], slot_mapping [T]", _scattered_shapes, *SCATTERED[:2]),
            _caches_rule(),
            contiguous(*SCATTERED, "slot_mapping"),
        ),
        value_rules=(
            that(
                "slots in slot_mapping that are in the cache, none twice", _scattered_slots, "slot_mapping", "key_cache"
            ),
        ),
        explicit=("cache_mode",),
        nz=("key_cache", "value_cache"),
        note="changes the caches in place; the default takes them for FRACTAL_NZ, Norm for plain ones",
    ),
)
