"""Rotary position embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from porter.kernels.ascend.catalogue.rules import absent, contiguous, dtypes, not_empty, one_of, rank, same_shape, that
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, I310P, PAGES, Call, VendorOp

ONE_DTYPE = "f16/f16/f16/f16 bf16/bf16/bf16/bf16 f32/f32/f32/f32"
ONE_DTYPE_310P = "f16/f16/f16/f16 f32/f32/f32/f32"
UNIFIED_BUFFER = 192 * 1024
"""Bytes of on-core memory of ascend-910b and ascend-910c, which bounds the heads of npu_apply_rotary_pos_emb."""

MUL_LAYOUTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "BNSD": {"half": ("11SD", "B1SD", "BNSD"), "interleave": ("11SD",)},
    "BSND": {"half": ("1S1D", "BS1D", "BSND"), "interleave": ("1S1D",)},
    "SBND": {"half": ("S11D", "SB1D", "SBND"), "interleave": ("S11D",)},
    "TND": {"half": ("T1D", "TND"), "interleave": ("T1D",)},
}
"""Layouts of npu_rotary_mul's input, and of r1 and r2 beside it. The operator is told none: it sees shapes."""


def mul_layout(call: Call) -> str | None:
    """A layout of npu_rotary_mul that the shapes fit with its limits on heads and batch, or None."""
    x, mode = call["input"], call["rotary_mode"]
    for layout, modes in MUL_LAYOUTS.items():
        if len(layout) != x.dim():
            continue
        sizes = dict(zip(layout, x.shape, strict=True))
        batch, heads = sizes.get("B", 1), sizes["N"]
        few = batch * heads < 1000 if mode == "interleave" else max(batch, heads) < 1000
        shapes = [tuple(1 if letter == "1" else sizes[letter] for letter in form) for form in modes.get(mode, ())]
        if few and tuple(call["r1"].shape) in shapes:
            return layout
    return None


def _even_head(call: Call) -> bool:
    head_dim = int(call["input"].shape[-1])
    return head_dim % 2 == 0 and head_dim < 896


def _within_one(call: Call) -> bool:
    return all(bool((call[name].abs() <= 1).all()) for name in ("r1", "r2"))


def _same_but_heads(call: Call) -> bool:
    """query and key agree in all but their heads; cos and sin [.., 1, D] go with them."""
    layout = call["layout"]
    if any(call[name].dim() != len(layout) for name in ("query", "key", "cos", "sin")):
        return False
    heads = layout.index("N")
    query, key, cos = (list(call[name].shape) for name in ("query", "key", "cos"))
    batches = {query[layout.index("B")], 1} if call.chip == A5 and "B" in layout else None
    if batches is not None and cos[layout.index("B")] in batches:
        cos[layout.index("B")] = query[layout.index("B")]
    query[heads] = key[heads] = 1
    return query == key == cos


def fits_buffer(query_heads: int, key_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether npu_apply_rotary_pos_emb has room for one token: aclnnApplyRotaryPosEmbV2's formula, bytes."""
    cast = dtype == torch.bfloat16
    width = 4 if cast else dtype.itemsize
    token = (query_heads + key_heads) * head_dim * width
    return 5 * token + 4 * head_dim * dtype.itemsize + cast * 8 * head_dim <= UNIFIED_BUFFER


def _fits(call: Call) -> bool:
    query, heads = call["query"], call["layout"].index("N")
    return fits_buffer(query.shape[heads], call["key"].shape[heads], query.shape[-1], query.dtype)


def _as_query_and_key(call: Call) -> Any:
    return torch.empty_like(call["query"]), torch.empty_like(call["key"])


def _as(name: str) -> Any:
    return lambda call: torch.empty_like(call[name], memory_format=torch.contiguous_format)


def _interleaved_angles(call: Call) -> bool:
    """cos [B, 1, S or 1, 64] beside x [B, N, S, 64]."""
    batch, _, length, head_dim = call["x"].shape
    return tuple(call["cos"].shape) in ((batch, 1, length, head_dim), (batch, 1, 1, head_dim))


OLDER = (A2, A3, I310P)
NAMES = ("query", "key", "cos", "sin")

OPS = (
    VendorOp(
        name="npu_rotary_mul",
        schema='(Tensor input, Tensor r1, Tensor r2, str rotary_mode="half", Tensor? rotate=None) -> Tensor',
        page=PAGES + "torch_npu-npu_rotary_mul.md; ascend-950: CANN ops-transformer aclnnRotaryPositionEmbeddingV2.md",
        chips=(A2, A3, A5, I310P),
        outputs=_as("input"),
        rules=(
            dtypes("input", "f16 bf16 f32"),
            dtypes("input", "f16 f32", chips=(I310P,)),
            dtypes("r1", "f16 bf16 f32"),
            dtypes("r2", "f16 bf16 f32"),
            rank("input", 3, 4),
            rank("input", 4, chips=(I310P,)),
            one_of("rotary_mode", "half", "interleave"),
            one_of("rotary_mode", "half", chips=(I310P,)),
            that("an even last dimension of input below 896", _even_head, "input"),
            that(
                "a last dimension of input of 128", lambda call: call["input"].shape[-1] == 128, "input", chips=(I310P,)
            ),
            same_shape("r1", "r2"),
            that(
                "r1 to have the sizes of a layout's sequence and last dimension, 1 for its heads, and fewer than 1000 "
                "heads and batch rows (interleave: their product, and r1 the same for all batch rows)",
                lambda call: mul_layout(call) is not None,
                "input",
                "r1",
                "rotary_mode",
            ),
            absent("rotate"),
        ),
        value_rules=(
            that("values of r1 and r2 in [-1, 1]; YaRN's factor must be applied outside", _within_one, "r1", "r2"),
        ),
        explicit=("rotary_mode",),
        note="r1 is the cosine; half pairs value i with i + D/2, interleave 2i with 2i + 1, and both keep their "
        "layout; r1 and r2 are rounded to the dtype of input",
    ),
    VendorOp(
        name="npu_apply_rotary_pos_emb",
        schema='(Tensor query, Tensor key, Tensor cos, Tensor sin, str layout="BSND", str rotary_mode="half") -> '
        "(Tensor, Tensor)",
        page=PAGES
        + "torch_npu-apply_rotary_pos_emb.md; on-core memory: CANN ops-transformer aclnnApplyRotaryPosEmbV2.md",
        chips=(A2, A3, A5, I310P),
        outputs=_as_query_and_key,
        rules=(
            dtypes(" ".join(NAMES), ONE_DTYPE),
            dtypes(" ".join(NAMES), ONE_DTYPE_310P, chips=(I310P,)),
            one_of("layout", "BSND", "TND", chips=OLDER),
            one_of("layout", "BSND", "SBND", "BNSD", "TND", chips=(A5,)),
            one_of("rotary_mode", "half", chips=OLDER),
            one_of("rotary_mode", "half", "interleave", chips=(A5,)),
            not_empty(*NAMES, chips=OLDER),
            that(
                "a last dimension of query of 64 or 128",
                lambda c: c["query"].shape[-1] in (64, 128),
                "query",
                chips=OLDER,
            ),
            that(
                "an even last dimension of query of 1024 or less",
                lambda call: call["query"].shape[-1] % 2 == 0 and call["query"].shape[-1] <= 1024,
                "query",
                chips=(A5,),
            ),
            same_shape("cos", "sin"),
            that(
                "sizes that differ in heads alone, of which cos has 1", _same_but_heads, "layout", "query", "key", "cos"
            ),
            that(
                f"so few heads that a token of query and key fits {UNIFIED_BUFFER} bytes of on-core memory",
                _fits,
                "layout",
                "query",
                "key",
                chips=(A2, A3),
            ),
        ),
        explicit=("layout", "rotary_mode"),
        note="changes query and key in place, which its schema does not say, and returns them",
    ),
    VendorOp(
        name="npu_interleave_rope",
        schema="(Tensor x, Tensor cos, Tensor sin) -> Tensor",
        page=PAGES + "torch_npu-npu_interleave_rope.md; ascend-950: CANN ops-transformer aclnnInterleaveRope.md",
        chips=(A2, A3, A5),
        outputs=_as("x"),
        rules=(
            dtypes("x cos sin", "f16/f16/f16 bf16/bf16/bf16"),
            rank("x", 4),
            that("a last dimension of x of 64", lambda call: call["x"].shape[-1] == 64, "x"),
            same_shape("cos", "sin"),
            that("cos [B, 1, S or 1, 64] for x [B, N, S, 64]", _interleaved_angles, "x", "cos"),
            contiguous("x", "cos", "sin"),
        ),
        note="takes pairs that are neighbours and gives halves: value 2i goes to i, 2i + 1 to i + D/2",
    ),
)
