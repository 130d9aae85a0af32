"""Which calls of torch_npu serve the attention Ops, and that they compute them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_formulas import normal
from attention_runs import FUSED, FUSED2, FUSION, Runs, runs_on

from porter.kernels.ascend import attention_calls
from porter.kernels.ascend.attention_masks import as_bias, whole_cache
from porter.kernels.ascend.attention_packed import BoundsOnHost
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, I310P
from porter.kernels.reference.attention import causal_mask

BF16 = torch.bfloat16


@pytest.fixture
def npu() -> Iterator[Runs]:
    with runs_on(A2) as runs:
        yield runs


def _states(heads: int, key_heads: int, queries: int, keys: int, dim: int, *, batch: int = 2, dtype: Any = BF16) -> Any:
    return (
        normal(batch, heads, queries, dim, dtype=dtype),
        normal(batch, key_heads, keys, dim, dtype=dtype, seed=1),
        normal(batch, key_heads, keys, dim, dtype=dtype, seed=2),
    )


@pytest.mark.parametrize("dim", [64, 72, 80, 128, 192, 256])
@pytest.mark.parametrize("heads, key_heads", [(8, 8), (8, 2), (7, 1)])
@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 37), (13, 13), (5, 19)])
def test_heads_and_sizes_of_models(npu: Runs, queries: int, keys: int, heads: int, key_heads: int, dim: int) -> None:
    states = _states(heads, key_heads, queries, keys, dim)
    assert npu.ratio("attention/gqa", *states, None, dim**-0.5, None) <= 1
    assert npu.names == [FUSED]


def test_a_cache_is_read_where_it_is(npu: Runs) -> None:
    query, key, value = _states(4, 2, 1, 64, 32)
    assert npu.ratio("attention/gqa", query, key[:, :, :19], value[:, :, :19], None, 0.2, None) <= 1
    (call,) = npu.calls
    assert (call["key"].data_ptr(), call["value"].data_ptr()) == (key.data_ptr(), value.data_ptr())
    assert call["actual_seq_lengths_kv"] == [19]


@pytest.mark.parametrize("shape", [(2, 3, 9, 4), (1, 3, 9, 4), (2, 1, 9, 4), (1, 1, 9, 4)], ids=str)
def test_whole_cache_finds_the_buffer_or_none(shape: tuple[int, ...]) -> None:
    buffer = torch.randn(shape)
    view = buffer[:, :, :5]
    found = whole_cache(view, view)
    assert (found is None) == view.is_contiguous()
    assert found is None or (torch.equal(found[0], buffer) and found[0].data_ptr() == buffer.data_ptr())
    assert whole_cache(buffer[:, :, 2:7].transpose(2, 3)) is None
    assert whole_cache(buffer[..., :3]) is None


def test_values_behind_keys_in_one_buffer_are_found(npu: Runs) -> None:
    query, both = normal(2, 4, 1, 32), normal(2, 2, 2, 40, 32, seed=5)
    key, value = (each[:, :, :19] for each in both.unbind(0))
    assert npu.ratio("attention/gqa", query, key, value, None, 0.2, None) <= 1
    assert npu.calls[0]["value"].data_ptr() == both[1].data_ptr()


def test_a_cache_that_ends_early_is_copied() -> None:
    values = torch.arange(30.0)
    cut = values.as_strided((2, 3, 4), (15, 4, 1))[:, None]
    assert whole_cache(cut) is None
    short = values.untyped_storage()
    assert whole_cache(torch.empty(0).set_(short, 3, (1, 3, 2, 3), (30, 10, 3, 1))[:, :, :2]) is None


def test_the_compressed_mask_is_made_once(npu: Runs) -> None:
    states = _states(4, 2, 5, 9, 32)
    masks = []
    for _ in range(2):
        assert npu.ratio("attention/gqa", *states, None, 0.2, None) <= 1
        masks.append(npu.calls[0]["atten_mask"])
    assert masks[0] is masks[1] or masks[0].data_ptr() == masks[1].data_ptr()
    assert npu.calls[0]["sparse_mode"] == 3


@pytest.mark.parametrize("window", [1, 3, 8, 100])
def test_windows(npu: Runs, window: int) -> None:
    prefill, decode = _states(4, 2, 11, 17, 32), _states(4, 2, 1, 17, 32)
    assert npu.ratio("attention/gqa", *prefill, None, 0.2, window) <= 1
    assert (npu.calls[0]["sparse_mode"], npu.calls[0]["pre_tokens"], npu.calls[0]["next_tokens"]) == (4, window - 1, 0)
    assert npu.ratio("attention/gqa", *decode, None, 0.2, window) <= 1
    assert npu.calls[0]["sparse_mode"] == 0
    assert npu.calls[0]["key"].shape[2] == min(window, 17)


def _left_padded(queries: int, keys: int) -> torch.Tensor:
    seen = torch.arange(keys) >= torch.tensor([0, 4, keys])[:, None]
    return causal_mask(queries, keys, None, torch.device("cpu")) & seen[:, None, None]


@pytest.mark.parametrize("variant", ["attention/gqa", "attention/sink"])
@pytest.mark.parametrize("queries", [1, 9])
def test_left_padded_batches(npu: Runs, queries: int, variant: str) -> None:
    states, mask = _states(4, 2, queries, 9, 32, batch=3), _left_padded(queries, 9)
    if variant == "attention/sink":
        states = *states, normal(4, seed=8)
    assert npu.ratio(variant, *states, mask, 0.2, None) <= 1
    (call,) = npu.calls
    assert call.op.name == FUSED
    if queries == 1:  # A mask of one query would be dropped beyond key 512.
        assert call["atten_mask"] is None
        assert call["pse_shift"].shape == (3, 4, 1, 9)
    else:
        assert call["inner_precise"] == 2


def test_left_padded_decode_over_a_longer_cache(npu: Runs) -> None:
    query, key, value = _states(4, 2, 1, 40, 32, batch=3)
    mask = _left_padded(1, 9)
    assert npu.ratio("attention/gqa", query, key[:, :, :9], value[:, :, :9], mask, 0.2, None) <= 1
    assert npu.calls[0]["pse_shift"].shape[-1] == 40


def test_a_mask_of_torchs_polarity_is_caught(npu: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_calls, "hidden", lambda mask: mask)
    states = _states(4, 2, 5, 9, 32)
    mask = torch.rand(2, 1, 5, 9, generator=torch.Generator().manual_seed(1)) < 0.5
    assert npu.ratio("attention/gqa", *states, mask, 0.2, None) > 10


def test_a_window_of_one_key_too_many_is_caught(npu: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention_calls.causal
    monkeypatch.setattr(attention_calls, "causal", lambda a: {**right(a), "pre_tokens": a.window})
    assert npu.ratio("attention/gqa", *_states(4, 2, 11, 17, 32), None, 0.2, 3) > 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_additive_masks_are_biases(npu: Runs, dtype: torch.dtype) -> None:
    for queries in (1, 5):
        states = _states(4, 2, queries, 9, 128, dtype=dtype)
        bias = normal(1, 1, queries, 9, dtype=dtype, seed=3)
        assert npu.ratio("attention/gqa", *states, bias, 128**-0.5, None) <= 1
        name = "pse" if dtype == torch.float32 else "pse_shift"
        assert npu.calls[0][name].shape == (1, 4, queries, 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_biases_are_finite_and_of_every_head(dtype: torch.dtype) -> None:
    seen = torch.tensor([[True, False, True]])[None, None]
    infinite = torch.zeros(1, 1, 1, 3, dtype=dtype).masked_fill(~seen, -torch.inf)
    for mask in (seen, infinite):
        bias = as_bias(mask, 4, dtype)
        assert bias.shape == (1, 4, 1, 3) and bias.is_contiguous() and bias.dtype == dtype
        assert bool(bias.isfinite().all())
        assert bias[0, 3, 0].tolist() == [0.0, torch.finfo(dtype).min, 0.0]


def test_a_bias_that_would_be_rounded_is_refused(npu: Runs) -> None:
    refused = npu.refusal("attention/gqa", *_states(4, 2, 5, 9, 32), torch.zeros(1, 1, 5, 9), 0.2, None)
    assert refused is not None and "additive attention_mask of torch.float32 beside torch.bfloat16" in refused


@pytest.mark.parametrize(
    "sinks, dim, queries, operator",
    [
        (BF16, 64, 5, FUSED2),
        (BF16, 64, 1, FUSED),
        (BF16, 80, 5, FUSED),
        (torch.float32, 64, 5, FUSED),
    ],
)
def test_sinks(npu: Runs, sinks: torch.dtype, dim: int, queries: int, operator: str) -> None:
    states = _states(8, 2, queries, 19, dim)
    for window in (None, 4):
        assert npu.ratio("attention/sink", *states, normal(8, dtype=sinks, seed=4), None, dim**-0.5, window) <= 1
        assert npu.names == [operator]


def test_bounds_are_copied_once_while_they_live() -> None:
    bounds, cu_seqlens = BoundsOnHost(), torch.tensor([0, 3, 8], dtype=torch.int32)
    first = bounds(cu_seqlens)
    assert first.tolist() == [3, 8] and first.dtype == torch.int64
    assert bounds(cu_seqlens) is first
    cu_seqlens[1] = 5
    assert bounds(cu_seqlens).tolist() == [5, 8]
    with torch.inference_mode():
        assert bounds(torch.tensor([0, 2, 4])).tolist() == [2, 4]


@pytest.mark.parametrize("chip, operator", [(A2, FUSION), (A3, FUSION), (A5, "npu_fusion_attention"), (I310P, None)])
def test_chips(chip: str, operator: str | None) -> None:
    half, wide = ((*_states(4, 2, 5, 9, 32, dtype=dtype), None, 0.2, None) for dtype in (BF16, torch.float32))
    packed = (*(normal(9, 2, 24, seed=seed) for seed in range(3)), torch.tensor([0, 4, 4, 9]), 0.2)
    with runs_on(chip) as runs:
        for variant, arguments in {"gqa": wide, "variable_length": packed}.items():
            if operator is None:
                refused = runs.refusal(f"attention/{variant}", *arguments)
                assert refused is not None and f"is not documented for {chip}" in refused
            else:
                assert runs.ratio(f"attention/{variant}", *arguments) <= 1
                assert runs.names == [operator]
        assert (runs.refusal("attention/gqa", *half) is None) == (chip != I310P)
