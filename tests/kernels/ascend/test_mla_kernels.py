"""Which calls of torch_npu serve latent attention, and that they compute it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_formulas import normal
from attention_runs import FUSED, FUSED2, FUSION, Runs, runs_on

from porter.kernels.ascend.catalogue.vendor_op import A2, A5
from porter.kernels.reference.attention import causal_mask

BF16 = torch.bfloat16
PRODUCT = "npu_transpose_batchmatmul"
DEEPSEEK = {"nope": 128, "rope": 64, "rank": 512, "value": 128}
SHIPPED = {"nope": 32, "rope": 16, "rank": 64, "value": 32}
"""The sizes of the DeepSeek models that porter ships."""


@pytest.fixture
def npu() -> Iterator[Runs]:
    with runs_on(A2) as runs:
        yield runs


def _states(heads: int, queries: int, keys: int, sizes: dict[str, int], *, dtype: Any = BF16, batch: int = 2) -> Any:
    rows = heads * (sizes["nope"] + sizes["value"])
    return (
        normal(batch, heads, queries, sizes["nope"], dtype=dtype),
        normal(batch, heads, queries, sizes["rope"], dtype=dtype, seed=1),
        normal(batch, 1, keys, sizes["rank"], dtype=dtype, seed=2),
        normal(batch, 1, keys, sizes["rope"], dtype=dtype, seed=3),
        (normal(rows, sizes["rank"], dtype=torch.float32, seed=4) * sizes["rank"] ** -0.5).to(dtype),
    )


def _padded(queries: int, keys: int) -> torch.Tensor:
    seen = torch.arange(keys) >= torch.tensor([0, 4])[:, None]
    return causal_mask(queries, keys, None, torch.device("cpu")) & seen[:, None, None]


@pytest.mark.parametrize("heads, order", [(3, [1, 0, 2]), (4, [1, 0, 2]), (128, [0, 1, 2])])
@pytest.mark.parametrize("queries, layout", [(1, "BSND_NBSD"), (3, "BSND_NBSD"), (17, "BSND")])
def test_absorbed_at_deepseeks_sizes(npu: Runs, queries: int, layout: str, heads: int, order: list[int]) -> None:
    states = _states(heads, queries, 21, DEEPSEEK)
    assert npu.ratio("mla_attention/absorbed", *states, None, 0.07) <= 1
    assert npu.names == [PRODUCT, FUSED2, PRODUCT]
    attention, after = npu.calls[1:]
    assert attention["input_layout"] == layout
    assert attention["num_query_heads"] == max(4, heads)
    assert attention["key"].data_ptr() == attention["value"].data_ptr() == states[2].data_ptr()
    assert after["perm_x1"] == order


def test_absorbed_reads_a_cache_where_it_is(npu: Runs) -> None:
    query_nope, query_rope, latent, key_rope, weight = _states(4, 1, 40, DEEPSEEK)
    cached = latent[:, :, :21], key_rope[:, :, :21]
    assert npu.ratio("mla_attention/absorbed", query_nope, query_rope, *cached, weight, None, 0.07) <= 1
    attention = npu.calls[1]
    assert attention["key"].data_ptr() == latent.data_ptr()
    assert attention["actual_seq_kvlen"] == [21]


@pytest.mark.parametrize("queries", [1, 5])
def test_absorbed_with_a_mask_goes_to_the_training_operator(npu: Runs, queries: int) -> None:
    states = _states(4, queries, 21, DEEPSEEK)
    assert npu.ratio("mla_attention/absorbed", *states, _padded(queries, 21), 0.07) <= 1
    assert npu.names == [PRODUCT, FUSION, PRODUCT]
    assert npu.calls[1]["query"].shape[-1] == 576


@pytest.mark.parametrize("queries", [1, 5, 13])
@pytest.mark.parametrize("masked", [False, True])
def test_shipped_models_absorb(npu: Runs, queries: int, masked: bool) -> None:
    states = _states(4, queries, 13, SHIPPED)
    assert npu.ratio("mla_attention/absorbed", *states, _padded(queries, 13) if masked else None, 0.15) <= 1
    assert npu.names == [PRODUCT, FUSED, PRODUCT]
    assert npu.calls[1]["key"].shape[-1] == 80


@pytest.mark.parametrize("queries", [1, 5, 13])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", [SHIPPED, DEEPSEEK], ids=["shipped", "deepseek"])
def test_expanded(npu: Runs, sizes: dict[str, int], masked: bool, queries: int) -> None:
    states = _states(4, queries, 13, sizes)
    assert npu.ratio("mla_attention/expanded", *states, _padded(queries, 13) if masked else None, 0.07) <= 1
    packed = sizes is DEEPSEEK and not masked
    assert npu.names == [FUSED2 if packed else FUSED]
    assert npu.calls[0]["input_layout"].startswith("TND") == packed


@pytest.mark.parametrize("variant", ["absorbed", "expanded"])
def test_float32_goes_to_the_training_operator(npu: Runs, variant: str) -> None:
    states = _states(4, 5, 13, SHIPPED, dtype=torch.float32)
    assert npu.ratio(f"mla_attention/{variant}", *states, None, 0.15) <= 1
    assert FUSION in npu.names


@pytest.mark.parametrize("masked", [False, True])
def test_absorbed_on_950(masked: bool) -> None:
    states = _states(4, 1, 13, DEEPSEEK)
    with runs_on(A5) as runs:
        assert runs.ratio("mla_attention/absorbed", *states, _padded(1, 13) if masked else None, 0.07) <= 1
        assert runs.names == [PRODUCT, "npu_fusion_attention" if masked else FUSED2, PRODUCT]


def test_more_than_128_heads_are_refused(npu: Runs) -> None:
    refused = npu.refusal("mla_attention/absorbed", *_states(129, 1, 3, DEEPSEEK, batch=1), None, 0.07)
    assert refused is not None and "heads" in refused
