"""Operators that write caches: the vendor's rules for where a token goes, checked token by token in float64."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from porter.kernels.ascend.catalogue.vendor_op import A2, I310P, VendorRefusal
from porter.kernels.ascend.dry_run import DryVendor
from porter.kernels.ascend.emulator.stand_in import Emulator
from porter.kernels.contract import UNIT_ROUNDOFF, row_error

F16, BF16, F32, I8 = torch.float16, torch.bfloat16, torch.float32, torch.int8
BATCH, LENGTH = 2, 5
EPSILON = 1e-6


def normal(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def latent_call(mode: str, index: torch.Tensor, cache: tuple[int, ...], dtype: torch.dtype = BF16) -> dict[str, Any]:
    """Arguments of npu_kv_rmsnorm_rope_cache with caches of `cache` but their last dimension, filled with 9."""
    turn = 3 * normal(BATCH, 1, LENGTH, 32, dtype=F32, seed=2).repeat(1, 1, 1, 2)
    return {
        "kv": normal(BATCH, 1, LENGTH, 576),
        "gamma": normal(512, seed=1),
        "cos": turn.cos().to(BF16),
        "sin": turn.sin().to(BF16),
        "index": index,
        "k_cache": torch.full((*cache, 64), 9).to(dtype),
        "ckv_cache": torch.full((*cache, 512), 9).to(dtype),
        "epsilon": EPSILON,
        "cache_mode": mode,
    }


def latent_oracle(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(turned keys, normalised latents) [B S, D] in float64: neighbours in, halves out."""
    kv = call["kv"].double().flatten(0, 2)
    latent, rotary = kv[:, :512], kv[:, 512:]
    latent = latent / ((latent * latent).mean(-1, keepdim=True) + EPSILON).sqrt() * call["gamma"].double()
    turn = torch.complex(call["cos"].double(), call["sin"].double()).flatten(0, 2)[:, :32]
    turned = torch.complex(rotary[:, 0::2], rotary[:, 1::2]) * turn
    return torch.cat((turned.real, turned.imag), dim=-1), latent


def token_of_plain(cache: torch.Tensor, slot: int) -> torch.Tensor:
    return cache.reshape(-1, cache.shape[-1])[slot]


def token_of_blocks(cache: torch.Tensor, slot: int) -> torch.Tensor:
    """A token of a cache whose memory is [blocks, D / c, block_size, c] under the shape [blocks, block_size, 1, D]."""
    _, block_size, _, head_dim = cache.shape
    last = 32 // cache.element_size()
    memory = cache.reshape(-1)
    block, place = divmod(slot, block_size)
    values = [
        memory[((block * (head_dim // last) + d // last) * block_size + place) * last + d % last]
        for d in range(head_dim)
    ]
    return torch.stack(values)


PAGED = torch.tensor([3, 40, 41, -1, 7, 70, 0, 33, 16, 17])
BLOCKED = torch.tensor([32, 0])
Reader = Callable[[torch.Tensor, int], torch.Tensor]
MODES: tuple[tuple[str, torch.Tensor, tuple[int, ...], Reader], ...] = (
    ("Norm", torch.tensor([[2, 0, 6, -1, 4], [6, 5, 4, 3, 2]]), (BATCH, 1, 7), token_of_plain),
    ("PA", PAGED, (5, 16, 1), token_of_plain),
    ("PA_BNSD", PAGED, (5, 16, 1), token_of_plain),
    ("PA_NZ", PAGED, (5, 16, 1), token_of_blocks),
    ("PA_BLK_BNSD", BLOCKED, (5, 16, 1), token_of_plain),
    ("PA_BLK_NZ", BLOCKED, (5, 16, 1), token_of_blocks),
)


def slots(mode: str, index: torch.Tensor) -> list[int]:
    """Where each token goes in the cache seen as one row of tokens; negative for nowhere."""
    if mode == "Norm":
        return [slot + 7 * row if slot >= 0 else -1 for row in range(BATCH) for slot in index[row].tolist()]
    if "BLK" in mode:
        return [start + token for start in index.tolist() for token in range(LENGTH)]
    return [int(slot) for slot in index]


@pytest.mark.parametrize("name", ("npu_kv_rmsnorm_rope_cache", "npu_kv_rmsnorm_rope_cache_v2"))
@pytest.mark.parametrize("mode, index, cache, read", MODES, ids=[mode for mode, *_ in MODES])
def test_latents_go_where_the_mode_says(
    emulator: Emulator, name: str, mode: str, index: torch.Tensor, cache: tuple[int, ...], read: Reader
) -> None:
    call = latent_call(mode, index, cache)
    shown = mode != "Norm"
    results = getattr(sys.modules["torch_npu"], name)(**call, is_output_kv=shown)
    keys, latents = latent_oracle(call)
    for token, slot in enumerate(slots(mode, index)):
        if slot >= 0:
            for stored, oracle in ((call["k_cache"], keys), (call["ckv_cache"], latents)):
                assert row_error(read(stored, slot)[None], oracle[token][None]) <= UNIT_ROUNDOFF[BF16] * 1.01
    written = sum(slot >= 0 for slot in slots(mode, index))
    assert int((call["k_cache"] != 9).sum()) <= 64 * written
    if not name.endswith("v2"):
        assert results[0].data_ptr() == call["k_cache"].data_ptr()
    for dense, oracle in zip(results[-2:], (keys, latents), strict=True):
        assert dense.shape[:3] == (BATCH, 1, LENGTH)
        if shown:
            assert row_error(dense.flatten(0, 2), oracle) <= UNIT_ROUNDOFF[BF16] * 1.01
        else:
            assert bool(dense.isnan().all())


@pytest.mark.parametrize("mode, read", (("PA", token_of_plain), ("PA_NZ", token_of_blocks)))
def test_latents_are_quantized_by_multiplying_with_the_scale(emulator: Emulator, mode: str, read: Reader) -> None:
    call = latent_call(mode, PAGED, (5, 32, 1), I8)
    scales = 20 + normal(64, dtype=F32).abs(), 20 + normal(512, dtype=F32).abs()
    sys.modules["torch_npu"].npu_kv_rmsnorm_rope_cache(**call, k_rope_scale=scales[0], c_kv_scale=scales[1])
    for stored, oracle, scale in zip((call["k_cache"], call["ckv_cache"]), latent_oracle(call), scales, strict=True):
        for token, slot in enumerate(PAGED.tolist()):
            if slot >= 0:
                exact = (oracle[token] * scale).clamp(-128, 127)
                assert float((read(stored, slot).double() - exact).abs().max()) <= 0.5 + 1e-4


def test_a_latent_cache_read_in_the_other_mode_is_garbage(emulator: Emulator) -> None:
    call = latent_call("PA_NZ", PAGED, (5, 16, 1))
    sys.modules["torch_npu"].npu_kv_rmsnorm_rope_cache(**call)
    keys, _ = latent_oracle(call)
    assert row_error(token_of_plain(call["k_cache"], 40)[None], keys[1][None]) > 0.5


def changed(**changes: Any) -> dict[str, Any]:
    return {**latent_call("PA", PAGED, (5, 16, 1)), **changes}


LATENT_REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    (changed(cache_mode="BNSD"), "needs cache_mode to be one of 'Norm', 'PA'"),
    (changed(kv=normal(BATCH, 1, LENGTH, 320)), "needs kv [B, 1, S, 576], gamma [512]"),
    (changed(kv=normal(BATCH, 2, LENGTH, 576)), "needs kv [B, 1, S, 576]"),
    (changed(gamma=normal(512, dtype=F32)), "needs kv / gamma / cos / sin as"),
    (changed(index=PAGED.int()), "needs index as i64"),
    (changed(index=PAGED[:4]), "enough blocks, and index [B S]"),
    (changed(cache_mode="PA_BLK_BNSD"), "or [B ceil(S / block_size)] for PA_BLK"),
    (changed(cache_mode="Norm"), "needs caches [B, 1, length, D] and index [B, S] for Norm"),
    (changed(k_cache=normal(5, 10, 1, 64), ckv_cache=normal(5, 10, 1, 512)), "32 bytes dividing block_size values"),
    (changed(k_cache=normal(1, 16, 1, 64), ckv_cache=normal(1, 16, 1, 512)), "enough blocks"),
    (changed(k_cache=normal(5, 16, 1, 64).half()), "needs caches of the dtype of kv"),
    (changed(k_rope_scale=torch.ones(64)), "or of int8 with both float32 scales"),
    (changed(k_rope_offset=torch.ones(64)), "needs no k_rope_offset or c_kv_offset, which the vendor does not support"),
    (changed(v=normal(BATCH, 1, LENGTH, 128)), "needs no v, which is not modelled by porter"),
)


@pytest.mark.parametrize("call, words", LATENT_REFUSED, ids=[words for _, words in LATENT_REFUSED])
def test_latent_cache_refuses_with_words(call: dict[str, Any], words: str) -> None:
    with pytest.raises(VendorRefusal) as refusal:
        DryVendor(A2).npu_kv_rmsnorm_rope_cache(**call)
    assert words in str(refusal.value)


@pytest.mark.parametrize("slot", (80, -2, 40))
def test_latent_cache_refuses_slots_outside_and_twice(emulator: Emulator, slot: int) -> None:
    index = PAGED.clone()
    index[0] = slot
    with pytest.raises(VendorRefusal, match="slots in index that are in the cache, or -1 to skip, none twice"):
        sys.modules["torch_npu"].npu_kv_rmsnorm_rope_cache(**changed(index=index))


def test_latent_cache_gives_nothing_for_norm_and_no_chip_without_it() -> None:
    norm = latent_call("Norm", torch.zeros(BATCH, LENGTH, dtype=torch.int64), (BATCH, 1, 7))
    with pytest.raises(VendorRefusal, match="needs is_output_kv False for Norm, which gives no outputs"):
        DryVendor(A2).npu_kv_rmsnorm_rope_cache(**norm, is_output_kv=True)
    with pytest.raises(VendorRefusal, match="is not documented for ascend-310p"):
        DryVendor(I310P).npu_kv_rmsnorm_rope_cache_v2(**changed())


@pytest.mark.parametrize("left_out, default", (("epsilon", "1e-05"), ("cache_mode", "'Norm'")))
def test_latent_caches_traps_must_be_passed(left_out: str, default: str) -> None:
    call = {name: value for name, value in changed().items() if name != left_out}
    for name in ("npu_kv_rmsnorm_rope_cache", "npu_kv_rmsnorm_rope_cache_v2"):
        with pytest.raises(VendorRefusal, match=f"{left_out} is left out; its default {default} is not what"):
            getattr(DryVendor(A2), name)(**call)
