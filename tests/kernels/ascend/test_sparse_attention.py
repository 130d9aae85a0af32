"""The lightning indexer and sparse latent attention of Ascend: semantics, refusals, and the kernels at real sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, I310P, Call, VendorRefusal
from porter.kernels.ascend.emulator.stand_in import Emulator, emulated_npu
from porter.kernels.ascend.provider import AscendProvider
from porter.kernels.registry import default_registry

DTYPES = (torch.bfloat16, torch.float16)
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with emulated_npu(A2) as active:
        yield active


def npu() -> Any:
    import torch_npu  # type: ignore[import-not-found]

    return torch_npu


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged(states: list[torch.Tensor], block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences [T, 1, D] in blocks that lie in reverse order, and the table; unused places are NaN."""
    counts = [-(-len(s) // block) for s in states]
    pool = torch.full((sum(counts) + 1, block, 1, states[0].shape[-1]), torch.nan, dtype=states[0].dtype)
    table = torch.full((len(states), max(counts) + 1), -1, dtype=torch.int32)
    free = list(range(sum(counts), 0, -1))
    for i, state in enumerate(states):
        for j in range(counts[i]):
            at = free.pop(0)
            rows = state[j * block : (j + 1) * block]
            pool[at, : len(rows)] = rows
            table[i, j] = at
    return pool, table


def arranged(layout_query: str, layout_key: str, query: list[torch.Tensor], key: list[torch.Tensor]) -> dict[str, Any]:
    """Sequences of queries [S, N, D] and keys [T, 1, D] in the layouts, with the arguments that go with them."""
    counted = (torch.tensor([len(x) for x in xs]) for xs in (query, key))
    taken, held = (n.to(torch.int32) for n in counted)
    arguments: dict[str, Any] = {"layout_query": layout_query, "lengths_query": taken, "lengths_key": held}
    if layout_query == "TND":
        arguments["query"], arguments["lengths_query"] = torch.cat(query), taken.cumsum(0, dtype=torch.int32)
    else:
        arguments["query"] = torch.nn.utils.rnn.pad_sequence(query, batch_first=True)
    if layout_key == "TND":
        arguments["key"], arguments["lengths_key"] = torch.cat(key), held.cumsum(0, dtype=torch.int32)
    elif layout_key == "BSND":
        arguments["key"] = torch.nn.utils.rnn.pad_sequence(key, batch_first=True)
    else:
        arguments["key"], arguments["block_table"] = paged(key, 16)
    return arguments


LAYOUTS = (("BSND", "BSND"), ("TND", "TND"), ("BSND", "PA_BSND"), ("TND", "PA_BSND"))
SEQUENCES = ((3, 37), (1, 5), (4, 19))  # queries, keys


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
    indices, values = npu().npu_lightning_indexer(
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
    indices, values = npu().npu_lightning_indexer(
        query, key, weights, layout_query="BSND", layout_key="BSND", sparse_count=9, sparse_mode=0, return_value=True
    )
    scores = weights[0, 0].double() @ (query[0, 0].double() @ key[0, :, 0].double().T).relu()
    assert values.dtype == torch.bfloat16
    torch.testing.assert_close(values[0, 0, 0].double(), scores[indices[0, 0, 0].long()], rtol=2.0**-7, atol=1e-2)


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
        npu().npu_lightning_indexer(**indexer_call(**changed))
    assert words in str(refused.value)


def test_lengths_of_tnd_are_prefix_sums(emulator: Emulator) -> None:
    call = indexer_call(query=normal(5, 8, 128), key=normal(9, 1, 128), weights=normal(5, 8))
    call.update(layout_query="TND", layout_key="TND", actual_seq_lengths_key=lengths(4, 9))
    with pytest.raises(VendorRefusal, match="actual_seq_lengths_query as prefix sums"):
        npu().npu_lightning_indexer(**call, actual_seq_lengths_query=lengths(2, 3))
    npu().npu_lightning_indexer(**call, actual_seq_lengths_query=lengths(2, 5))


def selection(queries: int, keys: int, count: int, block: int = 1, seed: int = 0) -> torch.Tensor:
    """Int32 [S, 1, K]: for each query `count` of the blocks that it sees at random, -1 after them."""
    generator = torch.Generator().manual_seed(seed + queries)
    rows = torch.full((queries, 1, count), -1, dtype=torch.int32)
    for row in range(queries):
        visible = -(-(keys - queries + row + 1) // block)
        taken = torch.randperm(visible, generator=generator)[:count]
        rows[row, 0, : len(taken)] = taken.to(torch.int32)
    return rows


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
    output, maximum, total = npu().npu_sparse_flash_attention(
        given["query"],
        given["key"].nan_to_num(),
        given["key"].nan_to_num(),
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


def attention_call(**changed: Any) -> dict[str, Any]:
    key = normal(1, 9, 1, 512)
    call = {
        "query": normal(1, 2, 4, 512),
        "key": key,
        "value": changed.get("key", key),
        "sparse_indices": selection(2, 9, 5)[None],
        "scale_value": 0.07,
        "query_rope": normal(1, 2, 4, 64),
        "key_rope": normal(1, 9, 1, 64),
        "sparse_block_size": 1,
        "layout_query": "BSND",
        "layout_kv": "BSND",
        "sparse_mode": 3,
        "attention_mode": 2,
    }
    return {
        name: value for name, value in {**call, **changed}.items() if not isinstance(value, str) or value != "left out"
    }


def row(*indices: int) -> torch.Tensor:
    return torch.tensor([[list(indices)], [[0, 1, 2, 3]]], dtype=torch.int32)[None]


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
    (A2, {"sparse_indices": row(1, -1, 2, 0)}, "begin with the keys that its query sees"),
    (A2, {"sparse_indices": row(8, 1, 2, 3)}, "begin with the keys that its query sees"),
    (A2, {"sparse_indices": row(1, 2, 3, 9)}, "begin with the keys that its query sees"),
    (I310P, {}, "is not documented for ascend-310p"),
)


@pytest.mark.parametrize(("chip", "changed", "words"), ATTENTION_REFUSALS, ids=[r[2] for r in ATTENTION_REFUSALS])
def test_attention_refuses(chip: str, changed: dict[str, Any], words: str) -> None:
    with emulated_npu(chip), pytest.raises(VendorRefusal) as refused:
        npu().npu_sparse_flash_attention(**attention_call(**changed))
    assert words in str(refused.value)


def test_key_that_is_hidden_may_stand_last(emulator: Emulator) -> None:
    with_hidden = npu().npu_sparse_flash_attention(**attention_call(sparse_indices=row(1, 2, 3, 8)))[0]
    without = npu().npu_sparse_flash_attention(**attention_call(sparse_indices=row(1, 2, 3, -1)))[0]
    assert torch.equal(with_hidden, without)


def test_query_that_sees_nothing_gives_zeros(emulator: Emulator) -> None:
    output = npu().npu_sparse_flash_attention(**attention_call(sparse_indices=row(-1, -1, -1, -1)))[0]
    assert (output[0, 0] == 0).all()
    assert (output[0, 1] != 0).any()


def test_sinks_take_part_in_the_sum_alone() -> None:
    sinks = torch.tensor([0.0, 1.0, -2.0, 5.0])
    with emulated_npu(A5):
        call = attention_call()
        output = npu().npu_sparse_flash_attention(**call, sinks=sinks)[0]
    tokens = call["sparse_indices"][0, 1, 0].long()
    keys = call["key"][0, tokens, 0].double()
    scores = (
        call["query"][0, 1].double() @ keys.T
        + call["query_rope"][0, 1].double() @ call["key_rope"][0, tokens, 0].double().T
    )
    scores = torch.cat((scores * 0.07, sinks.double()[:, None]), dim=1)
    wanted = scores.softmax(-1)[:, :-1] @ keys
    assert (output[0, 1].double() - wanted).norm() < 2.0**-7 * wanted.norm()


def real_indexer(queries: int, keys: int, top_k: int) -> tuple[Any, ...]:
    """DeepSeek-V3.2's own sizes: 64 heads of 128."""
    weights = normal(1, queries, 64) * 64**-0.5
    return normal(1, queries, 64, 128), normal(1, keys, 128), weights, None, 128**-0.5, top_k


def real_attention(queries: int, keys: int, selected: int, heads: int = 128) -> tuple[Any, ...]:
    """DeepSeek-V3.2's own sizes: 128 heads of 128 + 64 over latents of 512 + 64."""
    indices = selection(queries, keys, selected).transpose(0, 1)
    indices = indices.where(indices >= 0, torch.arange(selected, dtype=torch.int32))
    states = (normal(1, heads, queries, 128), normal(1, heads, queries, 64), normal(1, 1, keys, 512))
    weight = normal(heads * 256, 512) * 512**-0.5
    return *states, normal(1, 1, keys, 64), weight, indices, None, 192**-0.5


REAL = (
    ("indexer/lightning", real_indexer(1, 2101, 2048)),
    ("indexer/lightning", real_indexer(5, 307, 256)),
    ("indexer/lightning", real_indexer(7, 31, 2048)),
    ("sparse_mla_attention/absorbed", real_attention(1, 97, 64)),
    ("sparse_mla_attention/absorbed", real_attention(3, 41, 40, heads=16)),
)


@pytest.mark.parametrize("chip", (A2, A3, A5))
@pytest.mark.parametrize(("name", "arguments"), REAL)
def test_real_sizes_take_the_vendors_operator_without_a_copy_of_the_cache(
    name: str, arguments: tuple[Any, ...], chip: str
) -> None:
    key = tuple(name.split("/"))
    op, kernel = default_registry().op(*key), AscendProvider().implementation(*key, chip)
    assert kernel is not None
    seen: list[Call] = []
    with emulated_npu(chip) as emulator:
        emulator.observers.append(lambda call, result: seen.append(call))
        assert kernel.accepts(*arguments) is None
        got = kernel.call(*arguments)
    assert op.error(got, op.oracle(*arguments), *arguments) <= op.tolerance.relative(torch.bfloat16, *arguments)
    assert len(seen) == 1
    cache = arguments[1] if key[0] == "indexer" else arguments[2]
    assert seen[0]["key"].data_ptr() == cache.data_ptr()
    if key[0] != "indexer":
        assert seen[0]["key_rope"].data_ptr() == arguments[3].data_ptr()


def test_attention_keeps_what_a_query_sees_wherever_it_stands(emulator: Emulator) -> None:
    """Op arguments name keys in any order, -1 anywhere; the vendor's operator would lose those after a -1."""
    *states, indices, _, scaling = real_attention(3, 41, 40, heads=2)
    mixed = indices.masked_fill(torch.rand(indices.shape, generator=torch.Generator().manual_seed(1)) < 0.4, -1)
    kernel = AscendProvider().implementation("sparse_mla_attention", "absorbed", A2)
    op = default_registry().op("sparse_mla_attention", "absorbed")
    assert kernel is not None
    arguments = (*states, mixed.flip(-1), None, scaling)
    got = kernel.call(*arguments)
    assert op.error(got, op.oracle(*arguments), *arguments) <= op.tolerance.relative(torch.bfloat16, *arguments)


KERNEL_REFUSALS: tuple[tuple[str, str, tuple[Any, ...], str], ...] = (
    (A2, "indexer/lightning", (*real_indexer(3, 9, 4)[:3], torch.ones(1, 3, 9).bool(), 0.1, 4), "takes no mask"),
    (A2, "indexer/lightning", (*real_indexer(3, 9, 4)[:4], -0.1, 4), "npu_lightning_indexer leaves out: -0.1"),
    (A2, "indexer/lightning", real_indexer(3, 2101, 2100), "sparse_count of 1 to 2048"),
    (A2, "indexer/lightning", (normal(1, 1, 4, 160), normal(1, 9, 160), normal(1, 1, 4), None, 0.1, 4), "of 128"),
    (
        A2,
        "sparse_mla_attention/absorbed",
        (*real_attention(2, 9, 4, heads=2)[:-2], torch.ones(1, 1, 2, 9).bool(), 0.1),
        "no mask",
    ),
    (A2, "sparse_mla_attention/absorbed", real_attention(2, 9, 4, heads=129), "128 heads"),
    (I310P, "indexer/lightning", real_indexer(3, 9, 4), "is not documented for ascend-310p"),
)


@pytest.mark.parametrize(("chip", "name", "arguments", "words"), KERNEL_REFUSALS)
def test_kernel_refuses(chip: str, name: str, arguments: tuple[Any, ...], words: str) -> None:
    kernel = AscendProvider().implementation(*name.split("/"), chip)
    assert kernel is not None
    with emulated_npu(chip):
        assert words in (kernel.accepts(*arguments) or "accepted")


def test_cache_whose_sequences_lie_apart_is_refused_not_copied(emulator: Emulator) -> None:
    *states, weight, indices, mask, scaling = real_attention(1, 32, 16, heads=2)
    latent, rope = normal(2, 1, 64, 512)[:, :, :32], normal(2, 1, 64, 64)[:, :, :32]
    query = [s.expand(2, -1, -1, -1).contiguous() for s in states[:2]]
    kernel = AscendProvider().implementation("sparse_mla_attention", "absorbed", A2)
    assert kernel is not None
    refusal = kernel.accepts(*query, latent, rope, weight, indices.expand(2, -1, -1).contiguous(), mask, scaling)
    assert "key, value, key_rope contiguous" in (refusal or "accepted")
