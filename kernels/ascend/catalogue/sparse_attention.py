"""DeepSeek-V3.2's sparse attention: the lightning indexer, and latent attention over the keys that it selects."""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.catalogue.attention_layouts import LATENT, ROPE
from porter.kernels.ascend.catalogue.rules import contiguous, dtypes, given, one_of, size, that
from porter.kernels.ascend.catalogue.sparse_attention_layout import (
    contiguous_keys,
    layout_rules,
    length_rules,
    query_heads,
    spans,
)
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, PAGES, POWERS_OF_TWO, Call, VendorOp

COUNTS = (*range(1, 2049), *range(3072, 8193, 1024))
LOG_SUMS = "training, with layouts other than PA_BSND"


def selected_shape(call: Call) -> tuple[int, ...]:
    """Shape of the selection of a call: a head of sparse_count indices for each query."""
    return (*call["query"].shape[:-2], 1, call["sparse_count"])


def _indexed(call: Call) -> Any:
    query, shape = call["query"], selected_shape(call)
    values = query.new_empty(shape if call["return_value"] else (0,))
    return query.new_empty(shape, dtype=torch.int32), values


def _attended(call: Call) -> Any:
    query = call["query"]
    batch, heads = query.shape[:-2], query.shape[-2]
    sums = (batch[0], 1, *batch[1:], heads) if query.dim() == 4 else (1, *batch, heads)
    statistics = [query.new_empty(sums if call["return_softmax_lse"] else (0,), dtype=torch.float32) for _ in range(2)]
    return query.new_empty(query.shape), *statistics


def _visible_first(call: Call) -> bool:
    """Whether in each row the blocks that the query may see come before all others. The chip stops reading at -1, and
    reads no more entries than there are visible blocks."""
    indices, block = call["sparse_indices"], call["sparse_block_size"]
    rows = indices.reshape(-1, indices.shape[-1])
    for span in spans(call, "kv"):
        for query in range(span.queries):
            row = rows[span.rows.start + query].long()
            seen = (row >= 0) & (row * block < span.visible(query, call["sparse_mode"] == 3))
            if bool((seen[1:] & ~seen[:-1]).any()) or bool(row.max() * block >= span.keys):
                return False
    return True


SELECTED = that(
    "sparse_indices to be a head of one index or more for each query",
    lambda c: c["sparse_indices"].shape[:-1] == (*c["query"].shape[:-2], 1) and c["sparse_indices"].numel() > 0,
    "query",
    "sparse_indices",
)
VISIBLE_FIRST = that(
    "each row of sparse_indices to begin with the keys that its query sees, all else after them",
    _visible_first,
    "sparse_indices",
)


def _same_but_last(name: str) -> Any:
    return that(
        f"{name} to have the shape of query up to the last dimension",
        lambda call: call[name] is not None and call[name].shape[:-1] == call["query"].shape[:-1],
        "query",
        name,
    )


OPS = (
    VendorOp(
        name="npu_lightning_indexer",
        schema="(Tensor query, Tensor key, Tensor weights, *, Tensor? actual_seq_lengths_query=None, "
        "Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, str layout_query='BSND', "
        "str layout_key='BSND', int sparse_count=2048, int sparse_mode=3, int pre_tokens=9223372036854775807, "
        "int next_tokens=9223372036854775807, bool return_value=False) -> (Tensor, Tensor)",
        page=PAGES + "torch_npu-npu_lightning_indexer.md",
        chips=(A2, A3, A5),
        outputs=_indexed,
        rules=(
            *layout_rules("key"),
            dtypes("query key weights", "bf16/bf16/bf16 f16/f16/f16 bf16/bf16/f32 f16/f16/f32", chips=(A2, A3)),
            dtypes("query key weights", "bf16/bf16/bf16 f16/f16/f16", chips=(A5,)),
            contiguous("query", "weights"),
            *contiguous_keys(("key",), "key"),
            size("query", -1, "of 128", lambda n: n == 128),
            size("key", -1, "of 128", lambda n: n == 128),
            size("query", -2, "of 64 heads at most", lambda n: n <= 64, chips=(A2, A3)),
            query_heads(8, 16, 24, 32, 64, chips=(A5,)),
            that(
                "weights to be a number for each head of each query",
                lambda call: call["weights"].shape == call["query"].shape[:-1],
                "query",
                "weights",
            ),
            that(
                "sparse_count of 1 to 2048, or 3072 to 8192 in steps of 1024",
                lambda call: call["sparse_count"] in COUNTS,
                "sparse_count",
            ),
            that(
                f"return_value only in {LOG_SUMS}",
                lambda call: not call["return_value"] or call["layout_key"] != "PA_BSND",
                "return_value",
                "layout_key",
            ),
        ),
        value_rules=length_rules("key"),
        explicit=("layout_query", "layout_key", "sparse_count", "sparse_mode"),
        note="result 0 the indices, -1 after the last visible key (as the kernel's published source has it); no scale",
    ),
    VendorOp(
        name="npu_sparse_flash_attention",
        schema="(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, float scale_value, *, "
        "Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None, "
        "Tensor? query_rope=None, Tensor? key_rope=None, int sparse_block_size=1, str layout_query='BSND', "
        "str layout_kv='BSND', int sparse_mode=3, int pre_tokens=9223372036854775807, "
        "int next_tokens=9223372036854775807, int attention_mode=0, bool return_softmax_lse=False, "
        "Tensor? sinks=None) -> (Tensor, Tensor, Tensor)",
        page=PAGES + "torch_npu-npu_sparse_flash_attention.md",
        chips=(A2, A3, A5),
        outputs=_attended,
        rules=(
            one_of("attention_mode", 2),
            given("value", "query_rope", "key_rope", why="attention_mode 2 attends over latents with a rotated part"),
            *layout_rules("kv"),
            dtypes(
                "query key value query_rope key_rope sparse_indices",
                "bf16/bf16/bf16/bf16/bf16/i32 f16/f16/f16/f16/f16/i32",
            ),
            contiguous("query", "query_rope", "sparse_indices"),
            *contiguous_keys(("key", "value", "key_rope"), "kv"),
            size("query", -1, f"of {LATENT}", lambda n: n == LATENT),
            size("query_rope", -1, f"of {ROPE}", lambda n: n == ROPE),
            _same_but_last("query_rope"),
            that(
                f"key and value of {LATENT} dimensions and key_rope of {ROPE}, alike before them",
                lambda c: (
                    c["key"].shape == c["value"].shape
                    and c["key"].shape[-1] == LATENT
                    and c["key_rope"].shape == (*c["key"].shape[:-1], ROPE)
                ),
                "key",
                "value",
                "key_rope",
            ),
            query_heads(*POWERS_OF_TWO, chips=(A2, A3)),
            size("query", -2, "of 128 heads at most", lambda n: n <= 128, chips=(A5,)),
            SELECTED,
            that(
                "sparse_block_size to be a power of two of 128 at most",
                lambda c: c["sparse_block_size"] in POWERS_OF_TWO,
                "sparse_block_size",
            ),
            that(
                "sparse_block_size to divide the blocks of PA_BSND",
                lambda c: c["layout_kv"] != "PA_BSND" or c["key"].shape[1] % c["sparse_block_size"] == 0,
                "sparse_block_size",
                "key",
            ),
            one_of("sparse_block_size", 1, chips=(A5,)),
            that("no sinks", lambda c: c["sinks"] is None, "sinks", chips=(A2, A3)),
            that(
                "sinks as f32, one for each head",
                lambda c: (
                    c["sinks"] is None
                    or (c["sinks"].dtype == torch.float32 and c["sinks"].shape == c["query"].shape[-2:-1])
                ),
                "sinks",
                chips=(A5,),
            ),
            that(
                f"return_softmax_lse only in {LOG_SUMS}",
                lambda c: not c["return_softmax_lse"] or c["layout_kv"] != "PA_BSND",
                "return_softmax_lse",
                "layout_kv",
            ),
        ),
        value_rules=(
            *length_rules("kv"),
            that(
                "a value that equals key",
                lambda c: c["value"].data_ptr() == c["key"].data_ptr() or torch.equal(c["value"], c["key"]),
                "value",
            ),
            VISIBLE_FIRST,
        ),
        explicit=(
            "query_rope",
            "key_rope",
            "sparse_block_size",
            "layout_query",
            "layout_kv",
            "sparse_mode",
            "attention_mode",
        ),
        note="the default attention_mode 0 is not supported; a query that sees no key gives zeros (published source)",
    ),
)
