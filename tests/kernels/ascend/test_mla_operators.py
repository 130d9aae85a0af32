"""The emulated operators around latent attention against the vendor's formulas in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_formulas import close, normal

from porter.kernels.ascend.catalogue.vendor_op import FRACTAL_NZ, VendorRefusal

HEADS, TOKENS = 2, 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2]], ids=str)
def test_products_by_head(npu: Any, order: list[int], dtype: torch.dtype) -> None:
    left, right = normal(3, 7, 32, dtype=dtype), normal(3, 48, 32, dtype=dtype).transpose(1, 2)
    given = left if order[0] == 0 else left.transpose(0, 1)
    got = npu.npu_transpose_batchmatmul(given, right, perm_x1=order, perm_x2=[0, 1, 2], perm_y=[1, 0, 2])
    assert got.shape == (7, 3, 48)
    assert close(got, torch.einsum("bmk,bkn->mbn", left.double(), right.double()))


@pytest.mark.parametrize(
    "left, right, extra, words",
    [
        ((3, 7, 24), (3, 24, 32), {}, "dimension 1 of weight a multiple of 16"),
        ((3, 7, 32), (3, 32, 40), {}, "dimension 2 of weight a multiple of 16"),
        ((7, 3, 32), (3, 32, 32), {}, "of the batch and the inner size of input"),
        ((7, 128, 512), (128, 512, 16), {"perm_x1": [1, 0, 2]}, r"K \* B too where perm_x1 is \[1, 0, 2\]"),
        ((3, 7, 32), (3, 32, 32), {"perm_x2": [0, 2, 1]}, r"perm_x2 \[0, 1, 2\]"),
        ((3, 7, 32), (3, 32, 32), {"perm_y": [0, 1, 2]}, r"perm_y \[1, 0, 2\]"),
        ((3, 7, 32), (3, 32, 32), {"batch_split_factor": 2}, "batch_split_factor to be one of 1"),
        ((3, 7, 32), (3, 32, 32), {"bias": torch.zeros(32)}, "no bias, which is not supported yet"),
    ],
)
def test_products_refused_in_words(npu: Any, left: Any, right: Any, extra: dict[str, Any], words: str) -> None:
    with pytest.raises(VendorRefusal, match=f"npu_transpose_batchmatmul: needs .*{words}"):
        npu.npu_transpose_batchmatmul(normal(*left), normal(*right), **extra)


def _prolog(hidden: int = 1024, rank: int = 1536, nope: int = 128, block: int = 16) -> dict[str, Any]:
    return {
        "token_x": normal(TOKENS, hidden),
        "weight_dq": normal(hidden, rank, seed=1) / 32,
        "weight_uq_qr": normal(rank, HEADS * (nope + 64), seed=2) / 40,
        "weight_uk": normal(HEADS, nope, 512, seed=3) / 12,
        "weight_dkv_kr": normal(hidden, 576, seed=4) / 32,
        "rmsnorm_gamma_cq": normal(rank, seed=5),
        "rmsnorm_gamma_ckv": normal(512, seed=6),
        "rope_sin": normal(TOKENS, 64, seed=7),
        "rope_cos": normal(TOKENS, 64, seed=8),
        "kv_cache": torch.zeros(2, block, 1, 512, dtype=torch.bfloat16),
        "kr_cache": torch.zeros(2, block, 1, 64, dtype=torch.bfloat16),
        "cache_index": torch.tensor([17, 0, 5]),
        "rmsnorm_epsilon_cq": 1e-6,
        "rmsnorm_epsilon_ckv": 1e-6,
    }


def _norm(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gamma.double()


def _turned(x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """Neighbouring pairs turned; the first of all pairs, then the second of all."""
    first, second, half = x[..., ::2], x[..., 1::2], x.shape[-1] // 2
    low = first * cos[..., :half] - second * sin[..., :half]
    return torch.cat((low, second * cos[..., half:] + first * sin[..., half:]), dim=-1)


def _expected(a: dict[str, Any]) -> dict[str, torch.Tensor]:
    wide = {n: v.double() for n, v in a.items() if isinstance(v, torch.Tensor)}
    nope, sin, cos = a["weight_uk"].shape[1], wide["rope_sin"], wide["rope_cos"]
    latent = _norm(wide["token_x"] @ wide["weight_dq"], a["rmsnorm_gamma_cq"])
    heads = (latent @ wide["weight_uq_qr"]).unflatten(-1, (HEADS, -1))
    keys = wide["token_x"] @ wide["weight_dkv_kr"]
    return {
        "query": torch.einsum("thn,hnc->thc", heads[..., :nope], wide["weight_uk"]),
        "rope": _turned(heads[..., nope:], sin[:, None], cos[:, None]),
        "normed": latent,
        "kv": _norm(keys[:, :512], a["rmsnorm_gamma_ckv"]),
        "kr": _turned(keys[:, 512:], sin, cos),
    }


def _written(a: dict[str, Any], name: str) -> torch.Tensor:
    """The rows of the tokens; every other row of the cache is as it was."""
    rows = a[name].flatten(0, 2)
    kept = torch.ones(rows.shape[0], dtype=torch.bool)
    kept[a["cache_index"].flatten()] = False
    assert bool((rows[kept] == 0).all())
    return rows[a["cache_index"].flatten()]


@pytest.mark.parametrize("flag", [True, False])
def test_third_prolog(npu: Any, flag: bool) -> None:
    a = _prolog()
    for name in ("weight_dq", "weight_uq_qr", "weight_dkv_kr"):
        a[name] = npu.npu_format_cast(a[name], FRACTAL_NZ)
    query, rope, _, normed, _ = npu.npu_mla_prolog_v3(**a, query_norm_flag=flag)
    expected = _expected(a)
    assert close(query, expected["query"], 4.0)
    assert close(rope, expected["rope"], 4.0)
    assert close(_written(a, "kv_cache"), expected["kv"], 4.0)
    assert close(_written(a, "kr_cache"), expected["kr"], 4.0)
    assert close(normed, expected["normed"], 4.0) if flag else normed.numel() == 0


def test_second_prolog_writes_caches_that_it_returns(npu: Any) -> None:
    a = _prolog(hidden=7168)
    a |= {n: a[n][None] for n in ("token_x", "rope_sin", "rope_cos", "cache_index")}
    query, rope, kv_cache, kr_cache, scale = npu.npu_mla_prolog_v2(**a)
    expected = _expected(a | {n: a[n][0] for n in ("token_x", "rope_sin", "rope_cos")})
    assert close(query[0], expected["query"], 8.0)
    assert torch.equal(kv_cache, a["kv_cache"])
    assert torch.equal(kr_cache, a["kr_cache"])
    assert close(_written(a, "kv_cache"), expected["kv"], 4.0)
    assert rope.shape == (1, TOKENS, HEADS, 64)
    assert scale.shape == (1,)


def test_sine_comes_before_cosine(npu: Any) -> None:
    a = _prolog()
    right, wrong = (
        npu.npu_mla_prolog_v3(**{**a, **swap})[1]
        for swap in ({}, {"rope_sin": a["rope_cos"], "rope_cos": a["rope_sin"]})
    )
    assert close(right, _expected(a)["rope"], 4.0)
    assert not close(wrong, _expected(a)["rope"], 4.0)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda a: {"token_x": a["token_x"].half()}, "token_x / weight_dq"),
        (lambda a: {"weight_dq": a["weight_dq"].t()}, "contiguous"),
        (lambda a: _prolog(hidden=1280), "a hidden size He of 1024, 2048"),
        (lambda a: _prolog(rank=1024), "a query rank Hcq of 1536, 2048"),
        (lambda a: _prolog(nope=64), "a head size D of 128, 192"),
        (lambda a: _prolog(block=24), "blocks of 16 n up to 1024"),
        (lambda a: {"cache_mode": "PA_NZ"}, "cache_mode to be one of 'PA_BSND'"),
        (lambda a: {"weight_quant_mode": 1}, "weight_quant_mode to be one of 0"),
        (lambda a: {"kc_scale": 2.0}, "kc_scale to be one of 1.0"),
        (lambda a: {"cache_index": a["cache_index"].int()}, "cache_index int64"),
        (lambda a: {"cache_index": torch.tensor([32, 0, 1])}, "slots of cache_index in the cache, each once"),
        (lambda a: {"cache_index": torch.tensor([1, 0, 1])}, "slots of cache_index in the cache, each once"),
        (lambda a: {"rope_sin": a["rope_sin"][:, :32].contiguous()}, "that fit together"),
    ],
)
def test_prolog_refused_in_words(npu: Any, change: Any, words: str) -> None:
    a = _prolog()
    with pytest.raises(VendorRefusal, match=f"npu_mla_prolog_v3: needs .*{words}"):
        npu.npu_mla_prolog_v3(**{**a, **change(a)})


def test_prolog_needs_its_epsilons(npu: Any) -> None:
    a = _prolog()
    del a["rmsnorm_epsilon_ckv"]
    with pytest.raises(VendorRefusal, match="rmsnorm_epsilon_ckv is left out; its default 1e-05"):
        npu.npu_mla_prolog_v3(**a)
