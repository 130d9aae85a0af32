"""The emulated inference attention against the vendor's formulas in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_formulas import LIMIT, attention64, close, normal, seen_by

COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
SCALE = 0.2


def _call(npu: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **extra: Any) -> Any:
    arguments = {"scale": SCALE, "input_layout": "BNSD", "sparse_mode": 0, **extra}
    return npu.npu_fused_infer_attention_score(query, key, value, **arguments)


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """[B, N, S, D] in a dense layout."""
    if layout == "BNSD":
        return tensor.contiguous()
    moved = tensor.transpose(1, 2).contiguous()
    return moved if layout == "BSND" else moved.flatten(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads, key_heads", [(3, 3), (6, 2), (4, 1)])
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND", "BSND_NBSD", "BSH_NBSD", "BNSD_NBSD"])
def test_dense_layouts(npu: Any, layout: str, heads: int, key_heads: int, dtype: torch.dtype) -> None:
    query = normal(2, heads, 5, 32, dtype=dtype)
    key, value = (normal(2, key_heads, 7, 32, dtype=dtype, seed=s) for s in (1, 2))
    inputs, _, output = layout.partition("_")
    got, lse = _call(
        npu,
        *(_laid_out(t, inputs) for t in (query, key, value)),
        num_heads=heads,
        num_key_value_heads=key_heads,
        input_layout=layout,
        softmax_lse_flag=True,
    )
    pairs = [attention64(query[b], key[b], value[b], SCALE) for b in range(2)]
    expected = torch.stack([p[0] for p in pairs])
    expected = expected.transpose(0, 1) if output == "NBSD" else _laid_out(expected, output or inputs)
    if (output or inputs) == "BSH":
        got, expected = (t.unflatten(-1, (heads, -1)) for t in (got, expected))
    assert got.shape == expected.shape
    assert close(got, expected)
    torch.testing.assert_close(lse.double(), torch.stack([p[1] for p in pairs])[..., None], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("queries, keys", [(5, 5), (3, 11), (7, 4), (13, 29)])
@pytest.mark.parametrize("mode, before, after", [(2, LIMIT, LIMIT), (3, LIMIT, LIMIT), (4, 2, 0), (4, 3, 1), (4, 0, 0)])
def test_sparse_modes(npu: Any, mode: int, before: int, after: int, queries: int, keys: int) -> None:
    query, key, value = (normal(1, 2, n, 16, seed=s) for s, n in enumerate((queries, keys, keys)))
    extra = {"pre_tokens": before, "next_tokens": after, "num_heads": 2, "num_key_value_heads": 2}
    got, _ = _call(npu, query, key, value, atten_mask=COMPRESSED, **{**extra, "sparse_mode": mode})
    expected, _ = attention64(query[0], key[0], value[0], SCALE, seen_by(mode, queries, keys, before, after))
    assert close(got[0], expected)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("shape", ["QS", "1QS", "11QS", "B1QS"])
def test_full_masks_hide_where_they_are_true(npu: Any, shape: str, mode: int) -> None:
    query, key, value = (normal(2, 2, n, 16, seed=s) for s, n in enumerate((5, 9, 9)))
    seen = torch.rand(2 if shape[0] == "B" else 1, 1, 5, 9, generator=torch.Generator().manual_seed(3)) < 0.6
    seen[..., 2, :] = False
    mask = ~seen[(0,) * (4 - len(shape))]
    got, _ = _call(
        npu, query, key, value, atten_mask=mask, num_heads=2, num_key_value_heads=2, sparse_mode=mode, inner_precise=2
    )
    for b in range(2):
        expected, _ = attention64(query[b], key[b], value[b], SCALE, seen[b % seen.shape[0], 0])
        assert close(got[b], expected)
        assert bool((got[b, :, 2] == 0).all())


def test_one_query_takes_a_narrow_mask_and_a_bias_of_every_head(npu: Any) -> None:
    query, key, value = (normal(2, 4, n, 16, seed=s) for s, n in enumerate((1, 9, 9)))
    seen = torch.tensor([[True] * 9, [False] * 4 + [True] * 5])
    common = {"num_heads": 4, "num_key_value_heads": 4}
    by_mask, _ = _call(npu, query, key, value, atten_mask=~seen, **common)
    bias = torch.zeros(2, 4, 1, 9, dtype=torch.bfloat16).masked_fill(
        ~seen[:, None, None], torch.finfo(torch.bfloat16).min
    )
    by_bias, _ = _call(npu, query, key, value, pse_shift=bias, **common)
    assert torch.equal(by_mask, by_bias)
    for b in range(2):
        assert close(by_bias[b], attention64(query[b], key[b], value[b], SCALE, seen[b : b + 1])[0])


def test_bias_is_added_to_scaled_scores(npu: Any) -> None:
    query, key, value = (normal(1, 2, n, 16, seed=s) for s, n in enumerate((3, 5, 5)))
    bias = normal(1, 2, 3, 5, seed=9)
    got, _ = _call(npu, query, key, value, pse_shift=bias, num_heads=2, num_key_value_heads=2)
    assert close(got[0], attention64(query[0], key[0], value[0], SCALE, bias=bias[0])[0])


def test_exponentials_are_rounded_before_the_second_product_and_their_sum_is_not(npu: Any) -> None:
    query, key = torch.zeros(1, 1, 2, 16, dtype=torch.bfloat16), torch.zeros(1, 1, 2, 16, dtype=torch.bfloat16)
    query[..., 0], key[0, 0, 1, 0] = 1.0, -1.0
    value = torch.zeros(1, 1, 2, 16, dtype=torch.bfloat16)
    value[0, 0, 1] = 1.0
    got, _ = _call(npu, query, key, value, num_heads=1, num_key_value_heads=1, scale=0.4)
    weight = torch.tensor(-0.4).exp()
    expected = (weight.bfloat16().float() / (1 + weight)).bfloat16()
    assert expected != (weight / (1 + weight)).bfloat16()
    assert torch.equal(got, expected.expand_as(got))


def test_lengths_cut_keys_and_leave_rows_undefined(npu: Any) -> None:
    query, key, value = (normal(2, 2, n, 16, seed=s) for s, n in enumerate((4, 9, 9)))
    got, _ = _call(
        npu,
        query,
        key,
        value,
        num_heads=2,
        num_key_value_heads=2,
        actual_seq_lengths=[4, 2],
        actual_seq_lengths_kv=[9, 3],
    )
    assert close(got[1, :, :2], attention64(query[1, :, :2], key[1, :, :3], value[1, :, :3], SCALE)[0])
    assert bool(got[1, :, 2:].isnan().all())


@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (192, 128), (192, 192)], ids=str)
def test_packed_sequences_with_a_sink(npu: Any, sizes: tuple[int, int]) -> None:
    lengths, key_lengths = (3, 1, 4), (5, 1, 2)
    query = normal(sum(lengths), 4, sizes[0])
    key, value = (normal(sum(key_lengths), 2, size, seed=s + 1) for s, size in enumerate(sizes))
    sink = normal(4, seed=7) if sizes[1] <= 128 else None
    got, lse = npu.npu_fused_infer_attention_score_v2(
        query,
        key,
        value,
        actual_seq_qlen=[3, 4, 8],
        actual_seq_kvlen=[5, 6, 8],
        learnable_sink=sink,
        atten_mask=COMPRESSED,
        num_query_heads=4,
        num_key_value_heads=2,
        softmax_scale=SCALE,
        input_layout="TND",
        sparse_mode=3,
        return_softmax_lse=True,
    )
    assert lse.shape == (8, 4, 1)
    row = column = 0
    for queries, keys in zip(lengths, key_lengths, strict=True):
        q, k, v = query[row : row + queries], key[column : column + keys], value[column : column + keys]
        turned = [t.transpose(0, 1) for t in (q, k, v)]
        expected, _ = attention64(*turned, SCALE, seen_by(3, queries, keys), sink=sink)
        if queries > keys:  # Rows without keys hold nothing; a sink takes all of their weight.
            assert bool((got[row : row + queries - keys] == 0).all())
        assert close(got[row : row + queries].transpose(0, 1), expected)
        row, column = row + queries, column + keys


@pytest.mark.parametrize("flat", [True, False], ids=["(n, size, H)", "(n, N, size, D)"])
def test_pages(npu: Any, flat: bool) -> None:
    query = normal(2, 4, 1, 16)
    pages = [normal(7, 2, 32, 16, seed=s) for s in (1, 2)]
    given = [p.transpose(1, 2).flatten(2).contiguous() if flat else p for p in pages]
    table = torch.tensor([[6, 2, 0], [3, 5, 99]], dtype=torch.int32)
    got, _ = _call(
        npu,
        query,
        *given,
        num_heads=4,
        num_key_value_heads=2,
        block_table=table,
        block_size=32,
        actual_seq_lengths_kv=[70, 40],
    )
    for b, length in enumerate((70, 40)):
        rows = table[b][: -(-length // 32)].long()
        key, value = (p[rows].transpose(0, 1).flatten(1, 2)[:, :length] for p in pages)
        assert close(got[b], attention64(query[b], key, value, SCALE)[0])


@pytest.mark.parametrize("queries, mode", [(1, 0), (3, 3)])
def test_latent_attention_adds_the_rope_scores(npu: Any, queries: int, mode: int) -> None:
    query, query_rope = normal(2, queries, 4, 512), normal(2, queries, 4, 64, seed=1)
    latent, key_rope = normal(2, 6, 1, 512, seed=2), normal(2, 6, 1, 64, seed=3)
    got, _ = npu.npu_fused_infer_attention_score_v2(
        query,
        latent,
        latent,
        query_rope=query_rope,
        key_rope=key_rope,
        atten_mask=COMPRESSED if mode else None,
        num_query_heads=4,
        num_key_value_heads=1,
        softmax_scale=0.05,
        input_layout="BSND_NBSD",
        sparse_mode=mode,
    )
    assert got.shape == (4, 2, queries, 512)
    for b in range(2):
        q = torch.cat((query[b], query_rope[b]), dim=-1).transpose(0, 1)
        k = torch.cat((latent[b], key_rope[b]), dim=-1).transpose(0, 1)
        seen = seen_by(3, queries, 6) if mode else None
        assert close(got[:, b], attention64(q, k, latent[b].transpose(0, 1), 0.05, seen)[0])


def test_nothing_in_nothing_out(npu: Any) -> None:
    common = {"num_heads": 2, "num_key_value_heads": 2}
    key = normal(1, 2, 3, 16)
    assert _call(npu, normal(0, 2, 3, 16), key[:0], key[:0], **common)[0].shape == (0, 2, 3, 16)
    got, _ = _call(npu, normal(1, 2, 3, 16), key[:, :, :0].contiguous(), key[:, :, :0].contiguous(), **common)
    assert bool((got == 0).all())
