"""DeepSeek-V3.2's sparse attention over caches in int8: the indexer by int8 keys, and attention over int8 latents."""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.catalogue.attention_layouts import LATENT, ROPE
from porter.kernels.ascend.catalogue.rules import absent, contiguous, dtypes, one_of, size, that
from porter.kernels.ascend.catalogue.sparse_attention import SELECTED, VISIBLE_FIRST, selected_shape
from porter.kernels.ascend.catalogue.sparse_attention_layout import (
    contiguous_keys,
    layout_rules,
    length_rules,
    query_heads,
)
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, PAGES, POWERS_OF_TWO, Call, VendorOp

TILE = 128
PACKED = LATENT + 2 * ROPE + 4 * LATENT // TILE
"""Bytes of a key: the latent in int8, the rotated part in 16 bits, a float32 scale for each tile of the latent."""


def _indexed(call: Call) -> Any:
    return call["query"].new_empty(selected_shape(call), dtype=torch.int32)


def _attended(call: Call) -> Any:
    query = call["query"]
    return query.new_empty((*query.shape[:-1], query.shape[-1] - call["rope_head_dim"]))


def _in_half(call: Call) -> bool:
    return bool((call["weights"] * call["query_dequant_scale"]).isfinite().all())


OPS = (
    VendorOp(
        name="npu_quant_lightning_indexer",
        schema="(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale, Tensor key_dequant_scale, "
        "int query_quant_mode, int key_quant_mode, *, Tensor? actual_seq_lengths_query=None, "
        "Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, str layout_query='BSND', "
        "str layout_key='BSND', int sparse_count=2048, int sparse_mode=3, int pre_tokens=9223372036854775807, "
        "int next_tokens=9223372036854775807, int? query_dtype=None, int? key_dtype=None) -> Tensor",
        page=PAGES + "torch_npu-npu_quant_lightning_indexer.md",
        chips=(A2, A3, A5),
        outputs=_indexed,
        rules=(
            one_of("query_quant_mode", 0),
            one_of("key_quant_mode", 0),
            absent("query_dtype", "key_dtype", why="name 8-bit floats, which porter does not model"),
            *layout_rules("key"),
            dtypes("query key weights query_dequant_scale key_dequant_scale", "i8/i8/f16/f16/f16"),
            contiguous("query", "weights", "query_dequant_scale"),
            *contiguous_keys(("key", "key_dequant_scale"), "key", apart=(A3, A5)),
            size("query", -1, "of 128", lambda n: n == 128),
            size("key", -1, "of 128", lambda n: n == 128),
            size("query", -2, "of 64 heads at most", lambda n: n <= 64, chips=(A2, A3)),
            query_heads(8, 16, 24, 32, 64, chips=(A5,)),
            that(
                "weights and query_dequant_scale to be a number for each head of each query",
                lambda c: c["weights"].shape == c["query_dequant_scale"].shape == c["query"].shape[:-1],
                "query",
                "weights",
                "query_dequant_scale",
            ),
            that(
                "key_dequant_scale to be a number for each key",
                lambda c: c["key_dequant_scale"].shape == c["key"].shape[:-1],
                "key",
                "key_dequant_scale",
            ),
            that("sparse_count of 1 to 2048", lambda c: 1 <= c["sparse_count"] <= 2048, "sparse_count"),
        ),
        value_rules=(
            *length_rules("key"),
            that("weights times query_dequant_scale within float16", _in_half, "weights", "query_dequant_scale"),
        ),
        explicit=("layout_query", "layout_key", "sparse_count", "sparse_mode"),
        note="a scale for each head of a query and for each key; ends rows in -1 as npu_lightning_indexer",
    ),
    VendorOp(
        name="npu_kv_quant_sparse_flash_attention",
        schema="(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, float scale_value, int key_quant_mode, "
        "int value_quant_mode, *, Tensor? key_dequant_scale=None, Tensor? value_dequant_scale=None, "
        "Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None, "
        "int sparse_block_size=1, str layout_query='BSND', str layout_kv='BSND', int sparse_mode=3, "
        "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int attention_mode=0, "
        "int quant_scale_repo_mode=1, int tile_size=128, int rope_head_dim=64, int? key_dtype=None, "
        "int? value_dtype=None) -> Tensor",
        page=PAGES + "torch_npu-npu_kv_quant_sparse_flash_attention.md",
        chips=(A2, A3, A5),
        outputs=_attended,
        rules=(
            one_of("attention_mode", 2),
            one_of("key_quant_mode", 2),
            one_of("value_quant_mode", 2),
            one_of("quant_scale_repo_mode", 1),
            one_of("tile_size", TILE),
            one_of("rope_head_dim", ROPE),
            absent("key_dequant_scale", "value_dequant_scale", why="the vendor keeps for later"),
            absent("key_dtype", "value_dtype", why="name 8-bit floats, which porter does not model"),
            *layout_rules("kv"),
            dtypes("query key value sparse_indices", "bf16/i8/i8/i32 f16/i8/i8/i32"),
            contiguous("query", "sparse_indices"),
            *contiguous_keys(("key",), "kv"),
            size("query", -1, f"of {LATENT} + {ROPE}", lambda n: n == LATENT + ROPE),
            query_heads(*POWERS_OF_TWO, chips=(A2, A3)),
            query_heads(1, 2, 4, 8, 16, 32, 48, 64, 128, chips=(A5,)),
            size("key", -1, f"of {PACKED} bytes: latent, rotated part, scales", lambda n: n == PACKED),
            that(
                "value of the keys' sequences, with one head",
                lambda c: c["value"].shape[:-1] == c["key"].shape[:-1],
                "key",
                "value",
            ),
            SELECTED,
            one_of("sparse_block_size", 1, 2, 4, 8, 16, chips=(A2, A3)),
            one_of("sparse_block_size", 1, chips=(A5,)),
        ),
        value_rules=(
            *length_rules("kv"),
            VISIBLE_FIRST,
        ),
        explicit=("sparse_block_size", "layout_query", "layout_kv", "sparse_mode", "attention_mode"),
        note="the page gives the output query's shape; its examples and the vendor's code leave the rotated part out",
    ),
)
