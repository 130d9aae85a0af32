"""Hyper-connections of Ascend's 950, against formulas in float64, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from porter.kernels.ascend.catalogue.vendor_op import A2, A5, VendorRefusal
from porter.kernels.ascend.emulator.stand_in import Emulator, emulated_npu
from porter.kernels.ascend.provider import AscendProvider
from porter.kernels.ascend.vendor import load_torch_npu

DTYPES = (torch.bfloat16, torch.float16)
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with emulated_npu(A5) as active:
        yield active


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def read_call(dtype: torch.dtype = torch.bfloat16, tokens: tuple[int, ...] = (2, 3), **changed: Any) -> dict[str, Any]:
    call = {
        "x": normal(*tokens, 4, 48, dtype=dtype),
        "phi": normal(24, 192) / 14,
        "alpha": torch.tensor([0.7, 1.3, 2.0]),
        "bias": normal(24),
        "norm_eps": 1e-5,
        "hc_eps": 1e-3,
    }
    return {name: value for name, value in {**call, **changed}.items() if value is not ...}


@pytest.mark.parametrize("gamma", (None, normal(4, 48)))
@pytest.mark.parametrize("tokens", ((2, 3), (7,)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_block_reads(
    emulator: Emulator, dtype: torch.dtype, tokens: tuple[int, ...], gamma: torch.Tensor | None
) -> None:
    call = read_call(dtype, tokens, gamma=gamma)
    read, post, mixing, inverse, mix, pre = load_torch_npu().npu_mhc_pre(**call, out_flag=1)
    x = call["x"].double().flatten(-2)
    scaled = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    logits = (scaled if gamma is None else scaled * gamma.double().flatten()) @ call["phi"].double().T
    logits = logits * torch.tensor([0.7] * 4 + [1.3] * 4 + [2.0] * 16, dtype=torch.float64) + call["bias"].double()
    wanted = logits[..., :4].sigmoid() + 1e-3
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(pre.double(), wanted, **close)
    torch.testing.assert_close(post.double(), 2 * logits[..., 4:8].sigmoid(), **close)
    torch.testing.assert_close(mixing.double(), logits[..., 8:].unflatten(-1, (4, 4)), **close)
    torch.testing.assert_close(inverse.double(), (x.square().mean(-1) + 1e-5).rsqrt(), **close)
    assert mix.shape == (*tokens, 24)
    weighted = (wanted[..., None] * call["x"].double()).sum(-2)
    assert (read.double() - weighted).norm() <= UNIT[dtype] * weighted.norm()


@pytest.mark.parametrize("iterations", (1, 2, 20))
@pytest.mark.parametrize("count", (4, 6, 8))
def test_mixing_is_normalised_from_logits(emulator: Emulator, count: int, iterations: int) -> None:
    logits = normal(2, 3, count, count) * 3
    weights, *beside = load_torch_npu().npu_mhc_sinkhorn(logits, eps=1e-4, num_iters=iterations)
    wanted = logits.double().softmax(-1) + 1e-4
    for turn in range(2 * iterations - 1):
        wanted = wanted / (wanted.sum(-2 if turn % 2 == 0 else -1, keepdim=True) + 1e-4)
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=1e-6)
    assert all(t.numel() == 0 for t in beside)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mixed", (True, False))
def test_what_a_block_writes(emulator: Emulator, dtype: torch.dtype, mixed: bool) -> None:
    x, output, post = normal(3, 4, 17, dtype=dtype), normal(3, 17, dtype=dtype), normal(3, 4)
    mixing = normal(3, 4, 4).softmax(-1) if mixed else None
    written = load_torch_npu().npu_mhc_post(x, mixing, output, post)
    for token in range(3):
        for stream in range(4):
            wanted = float(post[token, stream]) * output[token].double()
            for other in range(4):
                share = float(other == stream) if mixing is None else float(mixing[token, other, stream])
                wanted = wanted + share * x[token, other].double()
            assert (written[token, stream].double() - wanted).norm() <= UNIT[dtype] * wanted.norm()


REFUSALS: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("npu_mhc_pre", A2, read_call(), "is not documented for ascend-910b"),
    ("npu_mhc_pre", A5, read_call(x=normal(2, 3, 5, 48).bfloat16()), "4, 6 or 8 streams"),
    ("npu_mhc_pre", A5, read_call(x=normal(2, 3, 4, 40).bfloat16()), "a multiple of 16"),
    ("npu_mhc_pre", A5, read_call(x=normal(2, 3, 4, 48)), "x / phi / alpha / bias / gamma as"),
    ("npu_mhc_pre", A5, read_call(phi=normal(24, 192).bfloat16()), "x / phi / alpha / bias / gamma as"),
    ("npu_mhc_pre", A5, read_call(phi=normal(192, 24)), "phi [n n + 2 n, n D]"),
    ("npu_mhc_pre", A5, read_call(alpha=normal(2)), "alpha [3]"),
    ("npu_mhc_pre", A5, read_call(gamma=normal(192)), "gamma [n, D]"),
    ("npu_mhc_pre", A5, read_call(inner_precise=1), "inner_precise to be one of 0"),
    ("npu_mhc_pre", A5, read_call(hc_eps=...), "hc_eps is left out"),
    ("npu_mhc_sinkhorn", A5, {"x": normal(3, 4, 6), "eps": 1e-6, "num_iters": 2}, "x [..., n, n]"),
    ("npu_mhc_sinkhorn", A5, {"x": normal(3, 4, 4), "eps": 1e-6, "num_iters": 101}, "num_iters of 1 to 100"),
    ("npu_mhc_sinkhorn", A5, {"x": normal(3, 4, 4), "eps": 1e-6}, "num_iters is left out"),
    (
        "npu_mhc_post",
        A5,
        {"x": normal(3, 4, 16).half(), "h_res": normal(3, 4, 4), "h_out": normal(3, 4).half(), "h_post": normal(3, 4)},
        "h_out [..., D]",
    ),
)


@pytest.mark.parametrize(("name", "chip", "call", "words"), REFUSALS, ids=[f"{r[0]} {r[3]}" for r in REFUSALS])
def test_refuses(name: str, chip: str, call: dict[str, Any], words: str) -> None:
    with emulated_npu(chip), pytest.raises(VendorRefusal) as refused:
        getattr(load_torch_npu(), name)(**call)
    assert words in str(refused.value)


def test_kernel_says_that_other_chips_have_no_such_operator() -> None:
    kernel = AscendProvider().implementation("hyper_connection", "expand", A2)
    assert kernel is not None
    states = normal(1, 2, 4, 32, dtype=torch.bfloat16), normal(1, 2, 32, dtype=torch.bfloat16)
    with emulated_npu(A2):
        refusal = kernel.accepts(*states, normal(1, 2, 4), normal(1, 2, 4, 4))
    assert refusal == "npu_mhc_post: is not documented for ascend-910b (only ascend-950)"
