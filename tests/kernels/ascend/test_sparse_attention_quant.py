"""Ascend's sparse attention over int8 caches, against formulas in float64, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sparse_attention_cases import LAYOUTS, SEQUENCES, UNIT, arranged, lengths, normal, paged, selection

from porter.kernels.ascend.catalogue.vendor_op import A2, A5, I310P, VendorRefusal
from porter.kernels.ascend.emulator.stand_in import Emulator, emulated_npu
from porter.kernels.ascend.vendor import load_torch_npu


def codes(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)


def positive(*shape: int, seed: int = 0) -> torch.Tensor:
    return (normal(*shape, dtype=torch.float32, seed=seed).abs() * 0.01 + 1e-3).half()


@pytest.mark.parametrize(("layout_query", "layout_key"), LAYOUTS)
def test_indexer_takes_the_best_int8_keys(emulator: Emulator, layout_query: str, layout_key: str) -> None:
    query, key = [codes(s, 5, 128, seed=s) for s, _ in SEQUENCES], [codes(t, 1, 128, seed=t) for _, t in SEQUENCES]
    weights = [normal(s, 5, dtype=torch.float16, seed=s) for s, _ in SEQUENCES]
    scales = [positive(s, 5, seed=s) for s, _ in SEQUENCES]
    key_scales = [positive(t, 1, seed=t) for _, t in SEQUENCES]
    given = arranged(layout_query, "TND" if layout_key == "PA_BSND" else layout_key, query, key)
    heads = (arranged(layout_query, "TND", x, key)["query"] for x in (weights, scales))
    beside = arranged(layout_query, "TND" if layout_key == "PA_BSND" else layout_key, query, key_scales)["key"]
    table, held = None, given["lengths_key"]
    if layout_key == "PA_BSND":
        # int8 has no NaN to poison unused places with.
        (pool, table), (beside, _) = paged([k.half() for k in key], 16), paged([s[:, None] for s in key_scales], 16)
        given["key"], beside = pool.nan_to_num().to(torch.int8), beside.squeeze(-1)
        held = lengths(*(t for _, t in SEQUENCES))
    indices = load_torch_npu().npu_quant_lightning_indexer(
        given["query"],
        given["key"],
        *heads,
        beside,
        0,
        0,
        actual_seq_lengths_query=given["lengths_query"],
        actual_seq_lengths_key=held,
        block_table=table,
        layout_query=layout_query,
        layout_key=layout_key,
        sparse_count=7,
        sparse_mode=3,
    )
    start = 0
    for i, (s, t) in enumerate(SEQUENCES):
        for row in range(s):
            visible = t - s + row + 1
            products = query[i][row].double() @ key[i][:visible, 0].double().T
            products = products * scales[i][row].double()[:, None] * key_scales[i][:visible, 0].double()
            scores = weights[i][row].double() @ products.relu()
            wanted = scores.topk(min(7, visible)).values
            got = indices[start + row, 0] if layout_query == "TND" else indices[i, row, 0]
            torch.testing.assert_close(scores[got[: len(wanted)].long()], wanted, rtol=1e-4, atol=1e-4)
            assert (got[len(wanted) :] == -1).all()
        start += s


def packed(latent: torch.Tensor, rope: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Keys [..., 656]: int8 latents, the rotated part and float32 scales, byte after byte."""
    return torch.cat((latent, rope.view(torch.int8), scales.view(torch.int8)), dim=-1)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize(("layout_query", "layout_key"), LAYOUTS[:2])
def test_attention_is_over_dequantized_latents(
    emulator: Emulator, layout_query: str, layout_key: str, dtype: torch.dtype
) -> None:
    query = [normal(s, 4, 576, dtype=dtype, seed=s) for s, _ in SEQUENCES]
    latent, rope = (
        [codes(t, 1, 512, seed=t) for _, t in SEQUENCES],
        [normal(t, 1, 64, dtype=dtype) for _, t in SEQUENCES],
    )
    scales = [normal(t, 1, 4, dtype=torch.float32).abs() / 64 for _, t in SEQUENCES]
    key = [packed(*parts) for parts in zip(latent, rope, scales, strict=True)]
    chosen = [selection(s, t, 6) for s, t in SEQUENCES]
    given = arranged(layout_query, layout_key, query, key)
    output = load_torch_npu().npu_kv_quant_sparse_flash_attention(
        given["query"],
        given["key"],
        given["key"],
        arranged(layout_query, "TND", chosen, key)["query"],
        0.05,
        2,
        2,
        actual_seq_lengths_query=given["lengths_query"],
        actual_seq_lengths_kv=given["lengths_key"],
        sparse_block_size=1,
        layout_query=layout_query,
        layout_kv=layout_key,
        sparse_mode=3,
        attention_mode=2,
    )
    start = 0
    for i, (s, _) in enumerate(SEQUENCES):
        whole = latent[i][:, 0].double().view(-1, 4, 128) * scales[i][:, 0].double()[:, :, None]
        keys = whole.flatten(1).to(dtype).double()
        for row in range(s):
            tokens = chosen[i][row, 0][chosen[i][row, 0] >= 0].long()
            both = torch.cat((keys, rope[i][:, 0].double()), dim=1)[tokens]
            wanted = (query[i][row].double() @ both.T * 0.05).softmax(-1) @ keys[tokens]
            got = output[start + row] if layout_query == "TND" else output[i, row]
            assert (got.double() - wanted).norm() < 2 * UNIT[dtype] * wanted.norm()
        start += s


def indexer_call(**changed: Any) -> dict[str, Any]:
    call = {
        "query": codes(1, 2, 8, 128),
        "key": codes(1, 9, 1, 128),
        "weights": normal(1, 2, 8, dtype=torch.float16),
        "query_dequant_scale": positive(1, 2, 8),
        "key_dequant_scale": positive(1, 9, 1),
        "query_quant_mode": 0,
        "key_quant_mode": 0,
        "layout_query": "BSND",
        "layout_key": "BSND",
        "sparse_count": 4,
        "sparse_mode": 3,
    }
    return {**call, **changed}


INDEXER_REFUSALS: tuple[tuple[str, dict[str, Any], str], ...] = (
    (A2, {"key_quant_mode": 1}, "key_quant_mode to be one of 0"),
    (A2, {"query_dtype": 1}, "no query_dtype or key_dtype"),
    (A2, {"weights": normal(1, 2, 8)}, "as i8/i8/f16/f16/f16"),
    (A2, {"key": normal(1, 9, 1, 128)}, "as i8/i8/f16/f16/f16"),
    (A2, {"key_dequant_scale": positive(1, 9)}, "key_dequant_scale to be a number for each key"),
    (A2, {"query_dequant_scale": positive(1, 2, 1)}, "a number for each head of each query"),
    (
        A2,
        {"weights": torch.full((1, 2, 8), 6e4).half(), "query_dequant_scale": positive(1, 2, 8) * 900},
        "within float16",
    ),
    (A2, {"sparse_count": 3072}, "sparse_count of 1 to 2048"),
    (A5, {"query": codes(1, 2, 12, 128)}, "8, 16, 24, 32 or 64 heads"),
    (I310P, {}, "is not documented for ascend-310p"),
)


@pytest.mark.parametrize(("chip", "changed", "words"), INDEXER_REFUSALS, ids=[r[2] for r in INDEXER_REFUSALS])
def test_indexer_refuses(chip: str, changed: dict[str, Any], words: str) -> None:
    with emulated_npu(chip), pytest.raises(VendorRefusal) as refused:
        load_torch_npu().npu_quant_lightning_indexer(**indexer_call(**changed))
    assert words in str(refused.value)


def attention_call(**changed: Any) -> dict[str, Any]:
    key = packed(codes(1, 9, 1, 512), normal(1, 9, 1, 64), normal(1, 9, 1, 4, dtype=torch.float32).abs())
    call = {
        "query": normal(1, 2, 4, 576),
        "key": key,
        "value": key,
        "sparse_indices": selection(2, 9, 5)[None],
        "scale_value": 0.05,
        "key_quant_mode": 2,
        "value_quant_mode": 2,
        "sparse_block_size": 1,
        "layout_query": "BSND",
        "layout_kv": "BSND",
        "sparse_mode": 3,
        "attention_mode": 2,
    }
    return {name: value for name, value in {**call, **changed}.items() if value is not ...}


ATTENTION_REFUSALS: tuple[tuple[str, dict[str, Any], str], ...] = (
    (A2, {"attention_mode": 0}, "attention_mode to be one of 2"),
    (A2, {"attention_mode": ...}, "attention_mode is left out"),
    (A2, {"key_quant_mode": 0}, "key_quant_mode to be one of 2"),
    (A2, {"tile_size": 64}, "tile_size to be one of 128"),
    (A2, {"key_dequant_scale": positive(1, 9, 1)}, "which the vendor keeps for later"),
    (A2, {"query": normal(1, 2, 4, 512)}, "of 512 + 64"),
    (A2, {"query": normal(1, 2, 48, 576)}, "1, 2, 4, 8, 16, 32, 64 or 128 heads"),
    (A2, {"key": codes(1, 9, 1, 640)}, "of 656 bytes"),
    (A2, {"key": normal(1, 9, 1, 656)}, "as bf16/i8/i8/i32"),
    (A2, {"sparse_block_size": 32}, "sparse_block_size to be one of 1, 2, 4, 8, 16"),
    (A2, {"sparse_indices": torch.tensor([[[[0, -1, 1]], [[0, 1, 2]]]], dtype=torch.int32)}, "begin with the keys"),
)


@pytest.mark.parametrize(("chip", "changed", "words"), ATTENTION_REFUSALS, ids=[r[2] for r in ATTENTION_REFUSALS])
def test_attention_refuses(chip: str, changed: dict[str, Any], words: str) -> None:
    with emulated_npu(chip), pytest.raises(VendorRefusal) as refused:
        load_torch_npu().npu_kv_quant_sparse_flash_attention(**attention_call(**changed))
    assert words in str(refused.value)
