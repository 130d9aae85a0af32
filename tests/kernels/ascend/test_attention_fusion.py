"""The emulated training attention against the vendor's formulas in float64, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_formulas import LIMIT, attention64, close, normal, seen_by

from porter.kernels.ascend.catalogue.vendor_op import A5, VendorRefusal
from porter.kernels.ascend.emulator.stand_in import emulated_npu

COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
SCALE = 0.2


def _states(*, batch: int = 2, queries: int = 5, keys: int = 7, sizes: tuple[int, int] = (24, 24), **kind: Any) -> Any:
    return (
        normal(batch, 4, queries, sizes[0], **kind),
        normal(batch, 2, keys, sizes[0], seed=1, **kind),
        normal(batch, 2, keys, sizes[1], seed=2, **kind),
    )


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    order = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "BSH": (0, 2, 1, 3), "SBH": (2, 0, 1, 3)}[layout]
    moved = tensor.permute(order).contiguous()
    return moved.flatten(2) if layout.endswith("H") else moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
def test_dense_layouts(npu: Any, layout: str, dtype: torch.dtype) -> None:
    states = _states(dtype=dtype, sizes=(24, 17))
    given = [_laid_out(t, layout) for t in states]
    got, largest, total, *_ = npu.npu_fusion_attention_v3(*given, 4, layout, scale=SCALE, sparse_mode=0)
    pairs = [attention64(*(t[b] for t in states), SCALE) for b in range(2)]
    expected = _laid_out(torch.stack([p[0] for p in pairs]), layout)
    if layout.endswith("H"):
        got, expected = (t.unflatten(-1, (4, -1)) for t in (got, expected))
    assert close(got, expected)
    assert largest.shape == total.shape == (2, 4, 5, 8)
    lse = (largest + total.log()).double()
    torch.testing.assert_close(lse, torch.stack([p[1] for p in pairs])[..., None].expand_as(lse), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode, before, after", [(2, LIMIT, LIMIT), (3, LIMIT, LIMIT), (4, 2, 0), (4, 1, 1)])
@pytest.mark.parametrize("queries, keys", [(5, 7), (6, 3)])
def test_sparse_modes(npu: Any, queries: int, keys: int, mode: int, before: int, after: int) -> None:
    query, key, value = _states(queries=queries, keys=keys, dtype=torch.float32)
    got, *_ = npu.npu_fusion_attention_v3(
        query,
        key,
        value,
        4,
        "BNSD",
        atten_mask=COMPRESSED,
        scale=SCALE,
        sparse_mode=mode,
        pre_tockens=before,
        next_tockens=after,
    )
    for b in range(2):
        seen = seen_by(mode, queries, keys, before, after)
        assert close(got[b], attention64(query[b], key[b], value[b], SCALE, seen)[0])


@pytest.mark.parametrize("shape", [(5, 7), (1, 1, 5, 7), (2, 1, 5, 7), (2, 4, 5, 7)], ids=str)
def test_masks_biases_and_sinks(npu: Any, shape: tuple[int, ...]) -> None:
    query, key, value = _states(dtype=torch.float32)
    seen = torch.rand(*shape, generator=torch.Generator().manual_seed(5)) < 0.6
    bias, sink = normal(1, 4, 5, 7, dtype=torch.float32), normal(4, dtype=torch.float32)
    got, *_ = npu.npu_fusion_attention_v3(
        query, key, value, 4, "BNSD", bias, None, ~seen, scale=1.0, sparse_mode=0, inner_precise=2, sink=sink
    )
    every = seen.expand(2, 4, 5, 7)
    for b in range(2):
        for head in range(4):
            states = query[b, head : head + 1], key[b, head // 2][None], value[b, head // 2][None]
            extra = every[b, head], bias[0, head : head + 1], sink[head : head + 1]
            assert close(got[b, head : head + 1], attention64(*states, 1.0, *extra)[0])


def test_packed_sequences_see_only_themselves(npu: Any) -> None:
    query, key, value = (normal(9, n, 24, seed=s) for s, n in enumerate((4, 2, 2)))
    ends = torch.tensor([3, 3, 8])
    got, *_ = npu.npu_fusion_attention_v3(
        query, key, value, 4, "TND", scale=SCALE, sparse_mode=0, actual_seq_qlen=ends, actual_seq_kvlen=ends
    )
    for rows in (slice(0, 3), slice(3, 8)):
        states = [t[rows].transpose(0, 1) for t in (query, key, value)]
        assert close(got[rows].transpose(0, 1), attention64(*states, SCALE)[0])
    assert bool(got[8:].isnan().all())


def test_first_version_reads_lists_on_950() -> None:
    with emulated_npu(A5):
        import torch_npu

        query, key, value = (normal(8, n, 24, seed=s) for s, n in enumerate((4, 2, 2)))
        lengths = {"actual_seq_qlen": [3, 8, 0], "actual_seq_kvlen": [3, 8, 0]}
        got, *_ = torch_npu.npu_fusion_attention(query, key, value, 4, "TND", scale=SCALE, sparse_mode=0, **lengths)
        rows = slice(3, 8)
        states = [t[rows].transpose(0, 1) for t in (query, key, value)]
        assert close(got[rows].transpose(0, 1), attention64(*states, SCALE)[0])
        with pytest.raises(VendorRefusal, match="prefix sums"):
            lengths["actual_seq_qlen"] = [5, 3, 8]
            torch_npu.npu_fusion_attention(query, key, value, 4, "TND", scale=SCALE, sparse_mode=0, **lengths)


REFUSED = {
    "layout FOO": ({"input_layout": "FOO"}, "input_layout to be one of"),
    "the heads of the keys": ({"head_num": 2}, "head_num to be the heads of query"),
    "larger values": ({"value": normal(2, 2, 7, 25)}, "at least the values'"),
    "two dtypes": ({"value": normal(2, 2, 7, 24, dtype=torch.float16)}, "query / key / value / pse as"),
    "dropout": ({"keep_prob": 0.9}, "keep_prob 1.0"),
    "causal without a mask": ({"sparse_mode": 3}, "without one they have no effect"),
    "a window without a mask": ({"pre_tockens": 3, "next_tockens": 0}, "without one they have no effect"),
    "prefix": ({"sparse_mode": 6, "atten_mask": COMPRESSED}, "sparse_mode to be one of 0, 1, 2, 3, 4"),
    "a mask of no rank": ({"atten_mask": torch.zeros(1, 5, 7, dtype=torch.bool)}, r"an atten_mask \(B, N, Q, S\)"),
    "heads of one sequence": ({"atten_mask": torch.zeros(1, 4, 5, 7, dtype=torch.bool)}, r"an atten_mask \(B, N"),
    "a bias beside a scale": ({"pse": torch.zeros(1, 4, 5, 7, dtype=torch.bfloat16)}, "scale 1.0 beside pse"),
    "a sink in bfloat16": ({"sink": normal(4)}, r"sink float32 \[head_num\]"),
    "lengths beside BNSD": (
        {"actual_seq_qlen": torch.tensor([5]), "actual_seq_kvlen": torch.tensor([7])},
        "in TND alone",
    ),
    "a row without keys": ({"atten_mask": torch.ones(5, 7, dtype=torch.bool)}, "inner_precise 2 where a query"),
    "torch's polarity": ({"atten_mask": ~COMPRESSED, "sparse_mode": 2}, "True and 1 are masked out"),
    "no keys": ({"key": normal(2, 2, 0, 24), "value": normal(2, 2, 0, 24)}, "at least one sequence"),
}


@pytest.mark.parametrize("label", REFUSED)
def test_refused_in_words(npu: Any, label: str) -> None:
    change, words = REFUSED[label]
    query, key, value = _states()
    arguments = {"query": query, "key": key, "value": value, "head_num": 4, "input_layout": "BNSD"}
    arguments |= {"scale": SCALE, "sparse_mode": 0, **change}
    with pytest.raises(VendorRefusal, match=f"npu_fusion_attention_v3: needs .*{words}"):
        npu.npu_fusion_attention_v3(**arguments)


@pytest.mark.parametrize("lengths", [[5, 3], [3, 9]], ids=["counts", "too many rows"])
def test_packed_lengths_are_prefix_sums(npu: Any, lengths: list[int]) -> None:
    states = [normal(8, 2, 16, seed=s) for s in range(3)]
    ends = torch.tensor(lengths)
    with pytest.raises(VendorRefusal, match="prefix sums"):
        npu.npu_fusion_attention_v3(
            *states, 2, "TND", scale=SCALE, sparse_mode=0, actual_seq_qlen=ends, actual_seq_kvlen=ends
        )
