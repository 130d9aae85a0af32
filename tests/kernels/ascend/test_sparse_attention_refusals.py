"""What the lightning indexer and sparse latent attention of Ascend refuse, in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sparse_attention_cases import (
    attention_call,
    first_row,
    lengths,
    normal,
    selection,
)

from porter.kernels.ascend.catalogue.vendor_op import A2, A5, I310P, VendorRefusal
from porter.kernels.ascend.emulator.stand_in import Emulator, emulated_npu
from porter.kernels.ascend.vendor import load_torch_npu


def indexer_call(**changed: Any) -> dict[str, Any]:
    call = {
        "query": normal(1, 2, 8, 128),
        "key": normal(1, 9, 1, 128),
        "weights": normal(1, 2, 8),
        "layout_query": "BSND",
        "layout_key": "BSND",
        "sparse_count": 4,
        "sparse_mode": 3,
    }
    return {name: value for name, value in {**call, **changed}.items() if value != "left out"}


PAGED = {"layout_key": "PA_BSND", "key": normal(2, 16, 1, 128), "actual_seq_lengths_key": lengths(9)}

INDEXER_REFUSALS: tuple[tuple[str, dict[str, Any], str], ...] = (
    (A2, {"query": normal(1, 2, 8, 64)}, "dimension -1 of query of 128"),
    (A2, {"key": normal(1, 9, 2, 128)}, "with one head"),
    (A2, {"query": normal(1, 2, 65, 128), "weights": normal(1, 2, 65)}, "64 heads at most"),
    (A5, {"query": normal(1, 2, 12, 128), "weights": normal(1, 2, 12)}, "8, 16, 24, 32 or 64 heads"),
    (A5, {"weights": normal(1, 2, 8).float()}, "query / key / weights as bf16/bf16/bf16, f16/f16/f16"),
    (A2, {"weights": normal(1, 2, 8).half()}, "query / key / weights as"),
    (A2, {"weights": normal(1, 8, 2)}, "a number for each head of each query"),
    (A2, {"query": normal(1, 8, 2, 128).transpose(1, 2)}, "query, weights contiguous"),
    (A2, {"key": normal(1, 18, 1, 128)[:, ::2]}, "key contiguous"),
    (A2, {"sparse_count": 2049}, "sparse_count of 1 to 2048"),
    (A2, {"sparse_count": 0}, "sparse_count of 1 to 2048"),
    (A2, {"sparse_mode": 2}, "sparse_mode to be one of 0, 3"),
    (A2, {"pre_tokens": 7}, "pre_tokens to be one of"),
    (A2, {"layout_query": "FOO"}, "layout_query to be one of 'BSND', 'TND'"),
    (A2, {"layout_key": "TND"}, "layout_key to be that of the queries"),
    (A2, {"layout_query": "TND", "layout_key": "TND"}, "query of as many dimensions as its layout"),
    (A2, {"actual_seq_lengths_query": lengths(2).long()}, "as i32/i32/i32"),
    (A2, {"actual_seq_lengths_query": lengths(1, 1)}, "one length per sequence"),
    (A2, {"actual_seq_lengths_query": lengths(3)}, "up to S each"),
    (A2, {**PAGED, "actual_seq_lengths_key": None, "block_table": lengths(0)[None]}, "where layout_key is TND or PA"),
    (A2, PAGED, "block_table [sequences, blocks] with PA_BSND"),
    (A2, {**PAGED, "block_table": lengths(2)[None]}, "names existing blocks"),
    (A2, {**PAGED, "key": normal(2, 8, 1, 128), "block_table": lengths(0, 1)[None]}, "a multiple of 16 tokens"),
    (A2, {**PAGED, "block_table": lengths(0)[None], "return_value": True}, "return_value only in training"),
    (A2, {"block_table": lengths(0)[None]}, "block_table [sequences, blocks] with PA_BSND and only there"),
    (I310P, {}, "is not documented for ascend-310p"),
    (A2, {"sparse_count": "left out"}, "sparse_count is left out; its default 2048"),
    (A2, {"sparse_mode": "left out"}, "sparse_mode is left out"),
)


@pytest.mark.parametrize(("chip", "changed", "words"), INDEXER_REFUSALS, ids=[r[2] for r in INDEXER_REFUSALS])
def test_indexer_refuses(chip: str, changed: dict[str, Any], words: str) -> None:
    with emulated_npu(chip), pytest.raises(VendorRefusal) as refused:
        load_torch_npu().npu_lightning_indexer(**indexer_call(**changed))
    assert words in str(refused.value)


def test_lengths_of_tnd_are_prefix_sums(emulator: Emulator) -> None:
    call = indexer_call(query=normal(5, 8, 128), key=normal(9, 1, 128), weights=normal(5, 8))
    call.update(layout_query="TND", layout_key="TND", actual_seq_lengths_key=lengths(4, 9))
    with pytest.raises(VendorRefusal, match="actual_seq_lengths_query as prefix sums"):
        load_torch_npu().npu_lightning_indexer(**call, actual_seq_lengths_query=lengths(2, 3))
    load_torch_npu().npu_lightning_indexer(**call, actual_seq_lengths_query=lengths(2, 5))


ATTENTION_REFUSALS: tuple[tuple[str, dict[str, Any], str], ...] = (
    (A2, {"attention_mode": "left out"}, "attention_mode is left out; its default 0"),
    (A2, {"attention_mode": 0}, "attention_mode to be one of 2"),
    (A2, {"query_rope": None}, "query_rope, key_rope: attention_mode 2"),
    (A2, {"query_rope": "left out"}, "query_rope is left out"),
    (A2, {"query": normal(1, 2, 4, 256)}, "dimension -1 of query of 512"),
    (A2, {"query_rope": normal(1, 2, 4, 32)}, "dimension -1 of query_rope of 64"),
    (A2, {"query": normal(1, 2, 3, 512), "query_rope": normal(1, 2, 3, 64)}, "1, 2, 4, 8, 16, 32, 64 or 128 heads"),
    (A5, {"query": normal(1, 2, 129, 512), "query_rope": normal(1, 2, 129, 64)}, "128 heads at most"),
    (A2, {"query_rope": normal(1, 2, 2, 64)}, "query_rope to have the shape of query"),
    (A2, {"key_rope": normal(1, 8, 1, 64)}, "alike before them"),
    (A2, {"key_rope": normal(1, 9, 1, 64).half()}, "sparse_indices as bf16/bf16/bf16/bf16/bf16/i32"),
    (A2, {"sparse_indices": selection(2, 9, 5)[None].long()}, "sparse_indices as bf16/bf16/bf16/bf16/bf16/i32"),
    (A2, {"sparse_indices": selection(2, 9, 5)}, "a head of one index or more for each query"),
    (A2, {"sparse_indices": torch.empty(1, 2, 1, 0, dtype=torch.int32)}, "a head of one index or more"),
    (A2, {"sparse_block_size": 3}, "a power of two of 128 at most"),
    (A5, {"sparse_block_size": 2}, "sparse_block_size to be one of 1"),
    (A2, {"sinks": torch.zeros(4)}, "no sinks"),
    (A5, {"sinks": torch.zeros(3)}, "sinks as f32, one for each head"),
    (A2, {"sparse_mode": 1}, "sparse_mode to be one of 0, 3"),
    (A2, {"value": normal(1, 9, 1, 512, seed=3)}, "a value that equals key"),
    (A2, {"key": normal(1, 18, 1, 512)[:, ::2]}, "key, value, key_rope contiguous"),
    (A2, {"sparse_indices": first_row(1, -1, 2, 0)}, "begin with the keys that its query sees"),
    (A2, {"sparse_indices": first_row(8, 1, 2, 3)}, "begin with the keys that its query sees"),
    (A2, {"sparse_indices": first_row(1, 2, 3, 9)}, "begin with the keys that its query sees"),
    (I310P, {}, "is not documented for ascend-310p"),
)


@pytest.mark.parametrize(("chip", "changed", "words"), ATTENTION_REFUSALS, ids=[r[2] for r in ATTENTION_REFUSALS])
def test_attention_refuses(chip: str, changed: dict[str, Any], words: str) -> None:
    with emulated_npu(chip), pytest.raises(VendorRefusal) as refused:
        load_torch_npu().npu_sparse_flash_attention(**attention_call(**changed))
    assert words in str(refused.value)
