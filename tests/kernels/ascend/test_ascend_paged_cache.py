"""Keys and values by head to paged caches, alone and fused with norm and rotation."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from porter.kernels.ascend.catalogue.vendor_op import A2, A5, FRACTAL_NZ, I310P, VendorRefusal
from porter.kernels.ascend.dry_run import DryVendor
from porter.kernels.ascend.emulator.stand_in import Emulator
from porter.kernels.contract import UNIT_ROUNDOFF, row_error

F16, BF16, F32, I8 = torch.float16, torch.bfloat16, torch.float32, torch.int8
SLOTS = torch.tensor([40, 3, 0, 17, 33])


def normal(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("dtype", (F16, BF16, I8))
@pytest.mark.parametrize("mode", ("Norm", None))
@pytest.mark.parametrize("slot_dtype", (torch.int32, torch.int64))
def test_scatter_to_plain_caches(
    emulator: Emulator, dtype: torch.dtype, mode: str | None, slot_dtype: torch.dtype
) -> None:
    key, value = normal(5, 2, 32, dtype=dtype), normal(5, 2, 48, dtype=dtype, seed=1)
    caches = torch.full((3, 16, 2, 32), 9).to(dtype), torch.full((3, 16, 2, 48), 9).to(dtype)
    vendor = sys.modules["torch_npu"]
    assert vendor.npu_scatter_pa_kv_cache(key, value, *caches, SLOTS.to(slot_dtype), cache_mode=mode) is None
    for states, cache in zip((key, value), caches, strict=True):
        rows = cache.flatten(0, 1)
        assert torch.equal(rows[SLOTS], states)
        others = torch.ones(48, dtype=torch.bool).index_fill(0, SLOTS, False)
        assert bool((rows[others] == 9).all())


@pytest.mark.parametrize("dtype, last", ((F16, 16), (BF16, 16), (I8, 32)))
@pytest.mark.parametrize("split", (False, True))
def test_scatter_to_blocked_caches(emulator: Emulator, dtype: torch.dtype, last: int, split: bool) -> None:
    key, value = normal(5, 2, 32, dtype=dtype), normal(5, 2, 64, dtype=dtype, seed=1)
    vendor, caches = sys.modules["torch_npu"], []
    for width in (32, 64):
        middle = (2, width // last) if split else (2 * width // last,)
        caches.append(vendor.npu_format_cast(torch.zeros(3, *middle, 32, last, dtype=dtype), FRACTAL_NZ))
    vendor.npu_scatter_pa_kv_cache(key, value, *caches, SLOTS, cache_mode="PA_NZ")
    for states, cache in zip((key, value), caches, strict=True):
        for token, slot in enumerate(SLOTS.tolist()):
            chunks = cache.view(3, -1, 32, last)[slot // 32, :, slot % 32]
            assert torch.equal(chunks.reshape(2, -1), states[token])


K, V = normal(5, 2, 32), normal(5, 2, 48)
KC, VC = normal(3, 16, 2, 32), normal(3, 16, 2, 48)
SCATTER_REFUSED: tuple[tuple[str, tuple[Any, ...], dict[str, Any], str], ...] = (
    (A2, (K, V, KC, VC, SLOTS), {"cache_mode": "PA_NZ"}, "needs caches [blocks, block_size, heads, D], or for PA_NZ"),
    (A2, (K, V, KC, VC, SLOTS), {"cache_mode": "PA"}, "needs cache_mode to be one of None, 'Norm', 'PA_NZ'"),
    (A2, (K, V.half(), KC, VC, SLOTS), {}, "needs key / value / key_cache / value_cache as"),
    (A2, (K.float(), V.float(), KC.float(), VC.float(), SLOTS), {}, "as f16/f16/f16/f16, bf16/bf16/bf16/bf16"),
    (A2, (K, V, KC, VC, SLOTS.float()), {}, "needs slot_mapping as i32, i64"),
    (A2, (K, V[:, :1], KC, VC, SLOTS), {}, "needs key [T, heads, D], value [T, heads, Dv], slot_mapping [T]"),
    (A2, (K, V, KC, VC, SLOTS[:3]), {}, "slot_mapping [T]"),
    (A2, (K, V, KC, VC[:2], SLOTS), {}, "needs caches [blocks, block_size, heads, D]"),
    (A2, (K.transpose(0, 1).contiguous().transpose(0, 1), V, KC, VC, SLOTS), {}, "contiguous"),
    (A2, (K, V, KC, VC, SLOTS), {"seq_lens": SLOTS}, "which is not modelled by porter"),
    (I310P, (K, V, KC, VC, SLOTS), {}, "is not documented for ascend-310p"),
)


@pytest.mark.parametrize("chip, arguments, keywords, words", SCATTER_REFUSED)
def test_scatter_refuses_with_words(chip: str, arguments: Any, keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(VendorRefusal) as refusal:
        DryVendor(chip).npu_scatter_pa_kv_cache(*arguments, **{"cache_mode": "Norm", **keywords})
    assert words in str(refusal.value)


def test_scatters_default_mode_must_not_be_relied_on() -> None:
    with pytest.raises(VendorRefusal, match="cache_mode is left out; its default 'PA_NZ' is not what models need"):
        DryVendor(A2).npu_scatter_pa_kv_cache(K, V, KC, VC, SLOTS)


@pytest.mark.parametrize("slot", (-1, 48, 3))
def test_scatter_refuses_slots_outside_and_twice(emulator: Emulator, slot: int) -> None:
    wrong = SLOTS.clone()
    wrong[0] = slot
    with pytest.raises(VendorRefusal, match="slots in slot_mapping that are in the cache, none twice"):
        sys.modules["torch_npu"].npu_scatter_pa_kv_cache(K, V, KC, VC, wrong, cache_mode="Norm")


def fused_call(dtype: torch.dtype = BF16, cache: torch.dtype | None = None, **changes: Any) -> dict[str, Any]:
    """3 query heads and 2 of keys and values, 2 sequences of 3 tokens."""
    turn = normal(6, 64, dtype=F32, seed=3).repeat(1, 2)
    last = 32 if cache == I8 else 16
    call = {
        "qkv": normal(6, 7 * 128, dtype=dtype),
        "q_gamma": normal(128, dtype=dtype, seed=1),
        "k_gamma": normal(128, dtype=dtype, seed=2),
        "cos": turn.cos().to(dtype),
        "sin": turn.sin().to(dtype),
        "index": torch.tensor([40, -1, 0, 17, 33, 63]),
        "q_out": torch.zeros(6, 3 * 128, dtype=dtype),
        "k_cache": torch.full((2, 2 * 128 // last, 32, last), 9).to(cache or dtype),
        "v_cache": torch.full((2, 2 * 128 // last, 32, last), 9).to(cache or dtype),
        "qkv_size": [2, 3, 7, 128],
        "head_nums": [3, 2, 2],
        "epsilon": 1e-6,
    }
    return {**call, **changes}


def fused_oracle(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values [T, heads, 128] in float64."""
    states = call["qkv"].double().view(6, 7, 128)
    turn = torch.complex(call["cos"].double(), call["sin"].double())[:, None, :64]

    def prepared(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        x = x / ((x * x).mean(-1, keepdim=True) + 1e-6).sqrt() * gamma.double()
        turned = torch.complex(x[..., :64], x[..., 64:]) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    return prepared(states[:, :3], call["q_gamma"]), prepared(states[:, 3:5], call["k_gamma"]), states[:, 5:]


def stored(cache: torch.Tensor, slot: int) -> torch.Tensor:
    return cache[slot // 32, :, slot % 32].reshape(2, 128)


@pytest.mark.parametrize("dtype", (F16, BF16))
def test_fused_projection_to_the_cache(emulator: Emulator, dtype: torch.dtype) -> None:
    call = fused_call(dtype)
    sys.modules["torch_npu"].npu_qkv_rms_norm_rope_cache(**call)
    query, key, value = fused_oracle(call)
    tolerance = UNIT_ROUNDOFF[dtype] * 1.01
    assert row_error(call["q_out"].view(6, 3, 128), query) <= tolerance
    for token, slot in enumerate(call["index"].tolist()):
        if slot >= 0:
            assert row_error(stored(call["k_cache"], slot), key[token]) <= tolerance
            assert torch.equal(stored(call["v_cache"], slot).double(), value[token])
    assert int((call["v_cache"] != 9).any(dim=1).any(dim=-1).sum()) == 5


@pytest.mark.parametrize("offset", (None, 3.0))
def test_fused_projection_divides_by_the_scale(emulator: Emulator, offset: float | None) -> None:
    scale = 0.05 + 0.01 * normal(2, 128, dtype=F32).abs()
    shift = None if offset is None else torch.full((2, 128), offset)
    call = fused_call(cache=I8, k_scale=scale, v_scale=scale, k_offset=shift, v_offset=shift)
    sys.modules["torch_npu"].npu_qkv_rms_norm_rope_cache(**call)
    _, key, value = fused_oracle(call)
    for states, cache in ((key, call["k_cache"]), (value, call["v_cache"])):
        for token, slot in enumerate(call["index"].tolist()):
            if slot >= 0:
                exact = (states[token] / scale + (offset or 0.0)).clamp(-128, 127)
                assert float((stored(cache, slot).double() - exact).abs().max()) <= 0.5 + 1e-3


FUSED_REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    (A2, fused_call(cache_mode="PA"), "needs cache_mode to be one of 'PA_NZ'"),
    (A2, fused_call(is_output_qkv=True), "needs is_output_qkv to be one of False"),
    (A2, fused_call(head_nums=[4, 2, 1]), "needs qkv_size [B, S, N, 128] and head_nums"),
    (A2, fused_call(q_gamma=normal(64)), "gammas [D]"),
    (A2, fused_call(cos=normal(6, 128, dtype=F32)), "needs qkv / q_gamma / k_gamma / cos / sin / q_out as"),
    (A2, fused_call(cache=I8), "or 32 for 16 in int8 with a float32 k_scale"),
    (A2, fused_call(v_offset=torch.ones(2, 128)), "needs v_cache [blocks, Nk D / 16, block_size, 16] as qkv"),
    (A2, fused_call(k_cache=normal(1, 16, 32, 16)), "and enough blocks"),
    (A5, fused_call(), "is not documented for ascend-950"),
)


@pytest.mark.parametrize("chip, call, words", FUSED_REFUSED, ids=[words for *_, words in FUSED_REFUSED])
def test_fused_projection_refuses_with_words(chip: str, call: dict[str, Any], words: str) -> None:
    with pytest.raises(VendorRefusal) as refusal:
        DryVendor(chip).npu_qkv_rms_norm_rope_cache(**call)
    assert words in str(refusal.value)


def test_fused_projection_refuses_wrong_slots_and_scales(emulator: Emulator) -> None:
    vendor = sys.modules["torch_npu"]
    with pytest.raises(VendorRefusal, match="slots in index that are in the caches, or -1 to skip, none twice"):
        vendor.npu_qkv_rms_norm_rope_cache(**fused_call(index=torch.tensor([40, 40, 0, 1, 2, 3])))
    with pytest.raises(VendorRefusal, match="needs scales other than 0"):
        vendor.npu_qkv_rms_norm_rope_cache(
            **fused_call(cache=I8, k_scale=torch.zeros(2, 128), v_scale=torch.ones(2, 128))
        )
