"""The lightning indexer and sparse latent attention of Ascend, against formulas in float64."""

from __future__ import annotations

import pytest
import torch
from sparse_attention_cases import (
    DTYPES,
    LAYOUTS,
    SEQUENCES,
    UNIT,
    arranged,
    attention_call,
    first_row,
    normal,
    selection,
)

from porter.kernels.ascend.catalogue.vendor_op import A5
from porter.kernels.ascend.emulator.stand_in import Emulator, emulated_npu
from porter.kernels.ascend.vendor import load_torch_npu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", (0, 3))
@pytest.mark.parametrize(("layout_query", "layout_key"), LAYOUTS)
def test_indexer_takes_the_best_keys_and_ends_rows_in_minus_one(
    emulator: Emulator, layout_query: str, layout_key: str, mode: int, dtype: torch.dtype
) -> None:
    query = [normal(s, 7, 128, dtype=dtype, seed=s) for s, _ in SEQUENCES]
    key = [normal(t, 1, 128, dtype=dtype, seed=t) for _, t in SEQUENCES]
    weights = [normal(s, 7, dtype=torch.float32, seed=s) for s, _ in SEQUENCES]
    given = arranged(layout_query, layout_key, query, key)
    joined = torch.cat(weights) if layout_query == "TND" else torch.nn.utils.rnn.pad_sequence(weights, batch_first=True)
    indices, values = load_torch_npu().npu_lightning_indexer(
        given["query"],
        given["key"],
        joined,
        actual_seq_lengths_query=given["lengths_query"],
        actual_seq_lengths_key=given["lengths_key"],
        block_table=given.get("block_table"),
        layout_query=layout_query,
        layout_key=layout_key,
        sparse_count=11,
        sparse_mode=mode,
    )
    assert indices.dtype == torch.int32
    assert values.numel() == 0
    start = 0
    for i, (s, t) in enumerate(SEQUENCES):
        rows = indices[start : start + s, 0] if layout_query == "TND" else indices[i, :s, 0]
        start += s
        for row in range(s):
            visible = t if mode == 0 else t - s + row + 1
            products = query[i][row].double() @ key[i][:visible, 0].double().T
            scores = weights[i][row].double() @ products.relu()
            wanted = scores.topk(min(11, visible))
            taken = rows[row][: min(11, visible)].long()
            torch.testing.assert_close(scores[taken], wanted.values, rtol=1e-4, atol=1e-3)
            assert len(set(taken.tolist())) == len(taken)
            assert (rows[row][len(taken) :] == -1).all()


def test_indexer_gives_the_values_it_sorted_by(emulator: Emulator) -> None:
    query, key, weights = normal(1, 1, 4, 128), normal(1, 9, 1, 128), normal(1, 1, 4)
    indices, values = load_torch_npu().npu_lightning_indexer(
        query, key, weights, layout_query="BSND", layout_key="BSND", sparse_count=9, sparse_mode=0, return_value=True
    )
    scores = weights[0, 0].double() @ (query[0, 0].double() @ key[0, :, 0].double().T).relu()
    assert values.dtype == torch.bfloat16
    torch.testing.assert_close(values[0, 0, 0].double(), scores[indices[0, 0, 0].long()], rtol=2.0**-7, atol=1e-2)


def attended(
    query: torch.Tensor, rope: torch.Tensor, key: torch.Tensor, key_rope: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [heads, 512], scores) in float64 of one query over the named tokens."""
    keys, ropes = key[tokens, 0].double(), key_rope[tokens, 0].double()
    scores = (query.double() @ keys.T + rope.double() @ ropes.T) * 0.07
    return scores.softmax(-1) @ keys, scores


@pytest.mark.parametrize("block", (1, 4))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("layout_query", "layout_key"), LAYOUTS)
def test_attention_is_over_the_selected_keys(
    emulator: Emulator, layout_query: str, layout_key: str, dtype: torch.dtype, block: int
) -> None:
    query, rope = ([normal(s, 4, d, dtype=dtype, seed=s) for s, _ in SEQUENCES] for d in (512, 64))
    key, key_rope = ([normal(t, 1, d, dtype=dtype, seed=t) for _, t in SEQUENCES] for d in (512, 64))
    chosen = [selection(s, t, 6, block) for s, t in SEQUENCES]
    given, turned = arranged(layout_query, layout_key, query, key), arranged(layout_query, layout_key, rope, key_rope)
    indices = arranged(layout_query, "TND", chosen, key)["query"]
    output, maximum, total = load_torch_npu().npu_sparse_flash_attention(
        given["query"],
        given["key"],
        given["key"],
        indices,
        0.07,
        block_table=given.get("block_table"),
        actual_seq_lengths_query=given["lengths_query"],
        actual_seq_lengths_kv=given["lengths_key"],
        query_rope=turned["query"],
        key_rope=turned["key"],
        sparse_block_size=block,
        layout_query=layout_query,
        layout_kv=layout_key,
        sparse_mode=3,
        attention_mode=2,
        return_softmax_lse=layout_key != "PA_BSND",
    )
    start = 0
    for i, (s, t) in enumerate(SEQUENCES):
        for row in range(s):
            blocks = chosen[i][row, 0]
            named = [int(b) * block + j for b in blocks if b >= 0 for j in range(block)]
            tokens = torch.tensor([n for n in named if n <= t - s + row])
            wanted, scores = attended(query[i][row], rope[i][row], key[i], key_rope[i], tokens)
            got = output[start + row] if layout_query == "TND" else output[i, row]
            # Rounded twice: the weights, and the output.
            assert (got.double() - wanted).norm() < 2 * UNIT[dtype] * wanted.norm()
            if layout_key != "PA_BSND":
                at = (0, start + row) if layout_query == "TND" else (i, 0, row)
                torch.testing.assert_close(maximum[at].double(), scores.amax(-1), rtol=1e-4, atol=1e-4)
                sums = (scores - scores.amax(-1, keepdim=True)).exp().sum(-1)
                torch.testing.assert_close(total[at].double(), sums, rtol=1e-4, atol=1e-4)
        start += s


def test_key_that_is_hidden_may_stand_last(emulator: Emulator) -> None:
    with_hidden = load_torch_npu().npu_sparse_flash_attention(**attention_call(sparse_indices=first_row(1, 2, 3, 8)))[0]
    without = load_torch_npu().npu_sparse_flash_attention(**attention_call(sparse_indices=first_row(1, 2, 3, -1)))[0]
    assert torch.equal(with_hidden, without)


def test_query_that_sees_nothing_gives_zeros(emulator: Emulator) -> None:
    output = load_torch_npu().npu_sparse_flash_attention(**attention_call(sparse_indices=first_row(-1, -1, -1, -1)))[0]
    assert (output[0, 0] == 0).all()
    assert (output[0, 1] != 0).any()


def test_sinks_take_part_in_the_sum_alone() -> None:
    sinks = torch.tensor([0.0, 1.0, -2.0, 5.0])
    with emulated_npu(A5):
        call = attention_call()
        output = load_torch_npu().npu_sparse_flash_attention(**call, sinks=sinks)[0]
    tokens = call["sparse_indices"][0, 1, 0].long()
    keys = call["key"][0, tokens, 0].double()
    scores = (
        call["query"][0, 1].double() @ keys.T
        + call["query_rope"][0, 1].double() @ call["key_rope"][0, tokens, 0].double().T
    )
    scores = torch.cat((scores * 0.07, sinks.double()[:, None]), dim=1)
    wanted = scores.softmax(-1)[:, :-1] @ keys
    assert (output[0, 1].double() - wanted).norm() < 2.0**-7 * wanted.norm()
