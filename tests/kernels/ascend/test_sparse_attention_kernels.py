"""The provider's indexer and sparse latent attention at DeepSeek-V3.2's own sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sparse_attention_cases import normal, selection

from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, I310P, Call
from porter.kernels.ascend.emulator.stand_in import Emulator, emulated_npu
from porter.kernels.ascend.provider import AscendProvider
from porter.kernels.registry import default_registry


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


def test_caches_longer_than_what_they_hold_are_read_in_place(emulator: Emulator) -> None:
    """The rows past the length are NaN, and the vendor's operators are given the buffers themselves."""
    seen: list[Call] = []
    emulator.observers.append(lambda call, result: seen.append(call))
    buffers = [torch.full((2, 1, 64, size), torch.nan, dtype=torch.bfloat16) for size in (512, 64, 128)]
    for buffer in buffers:
        buffer[:, :, :32] = normal(2, 1, 32, buffer.shape[-1])
    latent, rope, keys = (buffer[:, :, :32] for buffer in buffers)
    nope, turned, _, _, weight, _, _, scaling = real_attention(1, 32, 16, heads=2)
    queries = (nope.expand(2, -1, -1, -1).contiguous(), turned.expand(2, -1, -1, -1).contiguous())
    choosing = (normal(2, 1, 8, 128), keys[:, 0], normal(2, 1, 8), None, 0.1, 16)
    indices = calls("indexer/lightning", choosing)
    calls("sparse_mla_attention/absorbed", (*queries, latent, rope, weight, indices, None, scaling))
    assert [call["key"].data_ptr() for call in seen] == [buffers[2].data_ptr(), buffers[0].data_ptr()]
    assert seen[1]["key_rope"].data_ptr() == buffers[1].data_ptr()
    assert seen[1]["actual_seq_lengths_kv"].tolist() == [32, 32]


def calls(name: str, arguments: tuple[Any, ...]) -> torch.Tensor:
    """The kernel's output, after a comparison with the Op's oracle."""
    op, kernel = default_registry().op(*name.split("/")), AscendProvider().implementation(*name.split("/"), A2)
    assert kernel is not None
    assert kernel.accepts(*arguments) is None
    got: torch.Tensor = kernel.call(*arguments)
    assert op.error(got, op.oracle(*arguments), *arguments) <= op.tolerance.relative(torch.bfloat16, *arguments)
    return got


def test_cache_that_is_no_buffer_is_refused_not_copied(emulator: Emulator) -> None:
    *states, weight, indices, mask, scaling = real_attention(1, 32, 16, heads=2)
    kernel = AscendProvider().implementation("sparse_mla_attention", "absorbed", A2)
    assert kernel is not None
    latent = normal(1, 1, 64, 512)[:, :, ::2]
    refusal = kernel.accepts(*states[:2], latent, states[3], weight, indices, mask, scaling)
    assert "key, value, key_rope contiguous" in (refusal or "accepted")
