"""The fused projection of queries, keys and values, normalised and turned by head, straight to a paged cache."""

from __future__ import annotations

from math import ceil
from typing import Any

import torch

from porter.kernels.ascend.catalogue.cache import unique_slots, values_in_block
from porter.kernels.ascend.catalogue.rules import dtypes, not_empty, one_of, that
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, Call, Rule, VendorOp

HEAD_DIM = 128
"""The only size of a head."""
FLOATS = ("qkv", "q_gamma", "k_gamma", "cos", "sin", "q_out")


def _sizes(call: Call) -> bool:
    if len(call["qkv_size"]) != 4 or len(call["head_nums"]) != 3:
        return False
    (batch, length, heads, head_dim), (queries, keys, values) = call["qkv_size"], call["head_nums"]
    tokens = batch * length
    expected = {
        "qkv": (tokens, heads * head_dim),
        "q_gamma": (head_dim,),
        "k_gamma": (head_dim,),
        "cos": (tokens, head_dim),
        "sin": (tokens, head_dim),
        "index": (tokens,),
        "q_out": (tokens, queries * head_dim),
    }
    fits = head_dim == HEAD_DIM and keys == values and heads == queries + keys + values
    return fits and all(tuple(call[name].shape) == shape for name, shape in expected.items())


def _cached(call: Call, kind: str) -> bool:
    """Whether k_cache or v_cache has its shape, and its scale and offset go with its dtype."""
    cache, scale, offset = call[f"{kind}_cache"], call[f"{kind}_scale"], call[f"{kind}_offset"]
    batch, length, _, head_dim = call["qkv_size"]
    heads, last = call["head_nums"][1], values_in_block(cache)
    if cache.dim() != 4 or tuple(cache.shape[1::2]) != (heads * head_dim // last, last):
        return False
    blocks, _, block_size, _ = cache.shape
    if not block_size or block_size % last or blocks < ceil(length / block_size) * batch:
        return False
    if scale is None:
        return offset is None and cache.dtype == call["qkv"].dtype
    numbers = [n for n in (scale, offset) if n is not None]
    return cache.dtype == torch.int8 and all(
        n.dtype == torch.float32 and tuple(n.shape) == (heads, head_dim) for n in numbers
    )


def _cache_rule(kind: str) -> Rule:
    return that(
        f"{kind}_cache [blocks, Nk D / 16, block_size, 16] as qkv, or 32 for 16 in int8 with a float32 {kind}_scale "
        "[Nk, D], block_size a multiple of the last, and enough blocks",
        lambda call: _cached(call, kind),
        f"{kind}_cache",
        f"{kind}_scale",
        f"{kind}_offset",
    )


def _slots(call: Call) -> bool:
    return all(
        unique_slots(call["index"], call[name].shape[0] * call[name].shape[2], -1) for name in ("k_cache", "v_cache")
    )


def _no_outputs(call: Call) -> Any:
    return tuple(call["qkv"].new_empty(()) for _ in range(3))


OPS = (
    VendorOp(
        name="npu_qkv_rms_norm_rope_cache",
        schema="(Tensor qkv, Tensor q_gamma, Tensor k_gamma, Tensor cos, Tensor sin, Tensor index, Tensor(a!) q_out, "
        "Tensor(b!) k_cache, Tensor(c!) v_cache, int[4] qkv_size, int[3] head_nums, *, Tensor? k_scale=None, "
        "Tensor? v_scale=None, Tensor? k_offset=None, Tensor? v_offset=None, float epsilon=1e-06, "
        'str cache_mode="PA_NZ", bool is_output_qkv=False) -> (Tensor, Tensor, Tensor)',
        page="CANN ops-transformer posembedding/qkv_rms_norm_rope_cache/docs/aclnnQkvRmsNormRopeCache.md",
        chips=(A2, A3),
        outputs=_no_outputs,
        rules=(
            dtypes(" ".join(FLOATS), f"{'/'.join(['f16'] * 6)} {'/'.join(['bf16'] * 6)}"),
            dtypes("index", "i64"),
            one_of("cache_mode", "PA_NZ"),
            one_of("is_output_qkv", False),
            that(
                f"qkv_size [B, S, N, {HEAD_DIM}] and head_nums [Nq, Nk, Nk] that add up to N; qkv [B S, N D], gammas "
                "[D], cos and sin [B S, D], index [B S], q_out [B S, Nq D]",
                _sizes,
                "qkv_size",
                "head_nums",
                *FLOATS,
                "index",
            ),
            _cache_rule("k"),
            _cache_rule("v"),
            not_empty(*FLOATS, "k_cache", "v_cache"),
        ),
        value_rules=(
            that("slots in index that are in the caches, or -1 to skip, none twice", _slots, "index", "k_cache"),
            that(
                "scales other than 0",
                lambda call: all(bool((call[n] != 0).all()) for n in ("k_scale", "v_scale") if call[n] is not None),
                "k_scale",
                "v_scale",
            ),
        ),
        explicit=("epsilon",),
        note="queries go to q_out, keys and values to the caches, all in place; codes are values over their scale; the "
        "results are nothing",
    ),
)
