"""Fused attention of the training kernels, which torch_npu's own scaled_dot_product_attention calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from porter.kernels.ascend.catalogue.attention_fusion_lengths import LENGTH_TENSORS, LENGTHS, PREFIX_SUMS, VALUES
from porter.kernels.ascend.catalogue.attention_layouts import (
    COMPRESSED,
    UNLIMITED,
    Geometry,
    Names,
    arranged,
    geometry,
)
from porter.kernels.ascend.catalogue.attention_rules import on
from porter.kernels.ascend.catalogue.attention_schemas import FUSION, FUSION_THIRD
from porter.kernels.ascend.catalogue.rules import absent, dtypes, one_of, that
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, PAGES, Call, Rule, VendorOp

NAMES = Names(
    heads="head_num",
    key_heads="",
    scale="scale",
    query_lengths="actual_seq_qlen",
    key_lengths="actual_seq_kvlen",
    softmax_lse="",
    pse="pse",
    pre="pre_tockens",
    next="next_tockens",
)
LAYOUTS = {"BSH": 3, "SBH": 3, "BSND": 4, "BNSD": 4, "TND": 3}


def _ranks(call: Call) -> bool:
    rank = LAYOUTS[call["input_layout"]]
    return all(call[name].dim() == rank for name in ("query", "key", "value"))


def _heads(call: Call) -> bool:
    heads = call["head_num"]
    if heads <= 0:
        return False
    if call["input_layout"] not in ("BSH", "SBH"):
        return True
    width, keys, values = (call[name].shape[-1] for name in ("query", "key", "value"))
    if width % heads or keys % max(1, width // heads):
        return False
    return bool(values % max(1, keys // max(1, width // heads)) == 0)


def _sizes(call: Call, sizes: Geometry) -> bool:
    return sizes.head_dim == sizes.key_dim and 1 <= sizes.value_dim <= sizes.head_dim <= 768


def _mask(call: Call, sizes: Geometry) -> bool:
    mask, mode = call["atten_mask"], call["sparse_mode"]
    if mask is None:
        return True
    shape = tuple(mask.shape)
    if mode in (2, 3, 4):
        return shape == (COMPRESSED, COMPRESSED)
    if sizes.packed:
        return bool(mask.dim() == 2)
    square = (sizes.queries, sizes.keys)
    leading = {(sizes.batch, sizes.heads), (sizes.batch, 1), (1, 1)}
    return shape == square or (mask.dim() == 4 and shape[2:] == square and shape[:2] in leading)


def _bias(call: Call, sizes: Geometry) -> bool:
    bias = call["pse"]
    if bias is None:
        return True
    if sizes.packed or bias.dim() != 4:
        return False
    b, n, q, k = bias.shape
    return b in (1, sizes.batch) and n == sizes.heads and q in (1, sizes.queries) and k == sizes.keys


def _limits_have_a_mask(call: Call) -> bool:
    if call["atten_mask"] is not None:
        return True
    limits = (call["pre_tockens"], call["next_tockens"])
    return call["sparse_mode"] == 0 and limits == (UNLIMITED, UNLIMITED)


_sized = partial(on, NAMES)


def _size_rules() -> tuple[Rule, ...]:
    return (
        one_of("input_layout", *LAYOUTS),
        that("query, key and value of the ranks of input_layout", _ranks, "query", "key", "value", "input_layout"),
        that("the last dimension to be head_num heads", _heads, "query", "key", "value", "head_num"),
        _sized(
            "head_num to be the heads of query, at most 256 and a multiple of the keys'",
            lambda c, g: g.heads == c["head_num"] <= 256 and g.key_heads > 0 and g.heads % g.key_heads == 0,
            "query",
            "key",
            "head_num",
        ),
        _sized(
            "head sizes of query and key alike, at least the values' and at most 768", _sizes, "query", "key", "value"
        ),
        _sized(
            "at least one sequence, query and key",
            lambda c, g: min(g.batch, g.queries, g.keys) >= 1,
            "query",
            "key",
        ),
    )


def _mask_rules() -> tuple[Rule, ...]:
    return (
        dtypes("query key value pse", "f16/f16/f16/f16 bf16/bf16/bf16/bf16 f32/f32/f32/f32"),
        dtypes("atten_mask", "bool u8"),
        absent("padding_mask", "prefix"),
        that("keep_prob 1.0: dropout is not modelled by porter", lambda c: c["keep_prob"] == 1.0, "keep_prob"),
        one_of("sparse_mode", 0, 1, 2, 3, 4),
        one_of("inner_precise", 0, 1, 2),
        that(
            "an atten_mask with sparse_mode, pre_tockens and next_tockens: without one they have no effect",
            _limits_have_a_mask,
            "atten_mask",
            "sparse_mode",
            "pre_tockens",
            "next_tockens",
        ),
        _sized(
            "an atten_mask (B, N, Q, S), (B, 1, Q, S), (1, 1, Q, S) or (Q, S); (Q, S) of the longest in TND; "
            f"({COMPRESSED}, {COMPRESSED}) with sparse_mode 2, 3 and 4",
            _mask,
            "atten_mask",
            "sparse_mode",
            "query",
            "key",
        ),
    )


def _score_rules() -> tuple[Rule, ...]:
    return (
        _sized("a pse (B or 1, N, Q or 1, S), and none in TND", _bias, "pse", "query", "key"),
        that(
            "scale 1.0 beside pse: the page's formula scales the sum of scores and pse, its example the scores alone",
            lambda c: c["pse"] is None or c["scale"] == 1.0,
            "scale",
            "pse",
        ),
        _sized(
            "sink float32 [head_num]",
            lambda c, g: (
                c["sink"] is None or (c["sink"].dtype == torch.float32 and tuple(c["sink"].shape) == (g.heads,))
            ),
            "sink",
        ),
        that("softmax_layout '' or 'TND'", lambda c: c["softmax_layout"] in ("", "TND"), "softmax_layout"),
    )


RULES = (*_size_rules(), *_mask_rules(), *_score_rules())


def _outputs(extra: Callable[[torch.Tensor], tuple[Any, ...]]) -> Callable[[Call], tuple[Any, ...]]:
    def outputs(call: Call) -> tuple[Any, ...]:
        sizes, query = geometry(call, NAMES), call["query"]
        full = torch.empty(sizes.batch, sizes.heads, sizes.queries, sizes.value_dim, device="meta")
        rows = (sizes.queries, sizes.heads) if sizes.packed else (sizes.batch, sizes.heads, sizes.queries)
        statistics = [query.new_empty(*rows, 8, dtype=torch.float32) for _ in range(2)]
        output = query.new_empty(arranged(full, sizes.output_layout).shape)
        return (output, *statistics, query.new_empty(0), *extra(query))

    return outputs


NOTE = (
    "atten_mask: True and 1 are masked out. Pages call it a training operator; torch_npu's own "
    "scaled_dot_product_attention calls it in inference too, the third version on every chip from 910B1 below 950, "
    "which includes A3 although its page lists A2 alone (ScaledDotProductAttentionKernelNpuOpApi.cpp). Result 0 is the "
    "attention"
)
EXPLICIT = ("scale", "sparse_mode")

OPS = (
    VendorOp(
        name="npu_fusion_attention",
        schema=FUSION,
        page=PAGES + "torch_npu-npu_fusion_attention.md",
        chips=(A2, A5),
        outputs=_outputs(lambda query: (0, 0, 0)),
        rules=(*RULES, LENGTHS, PREFIX_SUMS, absent("dropout_mask")),
        value_rules=VALUES,
        explicit=EXPLICIT,
        note=NOTE,
    ),
    VendorOp(
        name="npu_fusion_attention_v3",
        schema=FUSION_THIRD,
        page=PAGES + "torch_npu-npu_fusion_attention_v3.md",
        chips=(A2, A3),
        outputs=_outputs(lambda query: tuple(query.new_empty(1, dtype=torch.int64) for _ in range(2))),
        rules=(*RULES, LENGTHS, LENGTH_TENSORS),
        value_rules=(*VALUES, PREFIX_SUMS),
        explicit=EXPLICIT,
        note=NOTE,
    ),
)
