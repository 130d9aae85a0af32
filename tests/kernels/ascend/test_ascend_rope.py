"""The vendor's rotary embeddings: documented semantics against complex numbers in float64, and what is refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, I310P, VendorRefusal
from porter.kernels.ascend.dry_run import DryVendor
from porter.kernels.ascend.emulator.stand_in import Emulator, emulated_npu
from porter.kernels.contract import UNIT_ROUNDOFF, row_error

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def normal(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(*shape: int, dtype: torch.dtype = BF16, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of shape [..., D], the same for both halves."""
    turn = 3 * normal(*shape[:-1], shape[-1] // 2, dtype=F32, seed=7)
    both = torch.cat((turn, turn), dim=-1)
    return (factor * both.cos()).to(dtype), (factor * both.sin()).to(dtype)


def neighbours(halves: torch.Tensor) -> torch.Tensor:
    """Angles for neighbours from those for halves."""
    return halves[..., : halves.shape[-1] // 2].repeat_interleave(2, dim=-1)


def turned(first: torch.Tensor, second: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """(first + i second)(cos + i sin) in float64; cos and sin [..., D], of which the first half is read."""
    half = cos.shape[-1] // 2
    turn = torch.complex(cos[..., :half].double(), sin[..., :half].double())
    return torch.complex(first.double(), second.double()) * turn


def expect_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    z = turned(x[..., :half], x[..., half:], cos, sin)
    return torch.cat((z.real, z.imag), dim=-1)


def expect_neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    z = turned(x[..., 0::2], x[..., 1::2], cos, sin)
    return torch.view_as_real(z).flatten(-2)


def bound(dtype: torch.dtype) -> float:
    return UNIT_ROUNDOFF[dtype] + 4 * UNIT_ROUNDOFF[F32]


LAYOUTS = (  # input, and r1 beside it, for half alone or for both modes
    ((2, 3, 5, 10), (1, 1, 5, 10), True),
    ((2, 3, 5, 10), (2, 1, 5, 10), False),
    ((2, 3, 5, 10), (2, 3, 5, 10), False),
    ((2, 5, 3, 34), (1, 5, 1, 34), True),
    ((2, 5, 3, 34), (2, 5, 1, 34), False),
    ((5, 2, 3, 2), (5, 1, 1, 2), True),
    ((7, 3, 16), (7, 1, 16), True),
    ((7, 3, 16), (7, 3, 16), False),
    ((1, 1, 1, 894), (1, 1, 1, 894), True),
)


@pytest.mark.parametrize("dtype", (F16, BF16, F32))
@pytest.mark.parametrize("shape, beside, both", LAYOUTS)
def test_rotary_mul_in_every_layout(
    emulator: Emulator, dtype: torch.dtype, shape: tuple[int, ...], beside: tuple[int, ...], both: bool
) -> None:
    vendor, x, (cos, sin) = sys.modules["torch_npu"], normal(*shape, dtype=dtype), angles(*beside, dtype=dtype)
    y = vendor.npu_rotary_mul(x, cos, sin, rotary_mode="half")
    assert y.dtype == dtype and row_error(y, expect_half(x, cos, sin)) <= bound(dtype)
    if both:
        y = vendor.npu_rotary_mul(x, neighbours(cos), neighbours(sin), rotary_mode="interleave")
        assert row_error(y, expect_neighbours(x, cos, sin)) <= bound(dtype)
    else:
        with pytest.raises(VendorRefusal, match="sizes of a layout's sequence"):
            vendor.npu_rotary_mul(x, neighbours(cos), neighbours(sin), rotary_mode="interleave")


def test_rotary_mul_rounds_wider_angles_to_its_input(emulator: Emulator) -> None:
    x, (cos, sin) = normal(1, 5, 3, 16), angles(1, 5, 1, 16, dtype=F32)
    vendor = sys.modules["torch_npu"]
    given = vendor.npu_rotary_mul(x, cos, sin, rotary_mode="half")
    assert torch.equal(given, vendor.npu_rotary_mul(x, cos.bfloat16(), sin.bfloat16(), rotary_mode="half"))


@pytest.mark.parametrize("dtype", (F16, BF16))
@pytest.mark.parametrize("length, beside", ((5, 5), (5, 1), (1, 1)))
def test_interleave_rope_gives_halves(emulator: Emulator, dtype: torch.dtype, length: int, beside: int) -> None:
    x, (cos, sin) = normal(2, 3, length, 64, dtype=dtype), angles(2, 1, beside, 64, dtype=dtype)
    y = sys.modules["torch_npu"].npu_interleave_rope(x, cos, sin)
    pairs = expect_neighbours(x, cos, sin)
    halves = torch.cat((pairs[..., 0::2], pairs[..., 1::2]), dim=-1)
    assert row_error(y, halves) <= bound(dtype)
    assert row_error(y, pairs) > 0.1


@pytest.mark.parametrize("dtype", (F16, BF16, F32))
@pytest.mark.parametrize(
    "layout, query, key, beside", (("BSND", (2, 5, 4), (2, 5, 1), (2, 5, 1)), ("TND", (7, 4), (7, 2), (7, 1)))
)
@pytest.mark.parametrize("head_dim", (64, 128))
def test_apply_rotary_pos_emb_turns_in_place(
    emulator: Emulator, dtype: torch.dtype, layout: str, query: Any, key: Any, beside: Any, head_dim: int
) -> None:
    q, k = normal(*query, head_dim, dtype=dtype), normal(*key, head_dim, dtype=dtype, seed=1)
    cos, sin = angles(*beside, head_dim, dtype=dtype, factor=1.25)
    expected = expect_half(q, cos, sin), expect_half(k, cos, sin)
    vendor = sys.modules["torch_npu"]
    first, second = vendor.npu_apply_rotary_pos_emb(q, k, cos, sin, layout=layout, rotary_mode="half")
    assert first.data_ptr() == q.data_ptr() and second.data_ptr() == k.data_ptr()
    assert row_error(q, expected[0]) <= bound(dtype) and row_error(k, expected[1]) <= bound(dtype)


def test_apply_rotary_pos_emb_on_950_has_more_modes_and_layouts() -> None:
    with emulated_npu(A5):
        q, k, (cos, sin) = normal(2, 3, 5, 40), normal(2, 1, 5, 40), angles(1, 1, 5, 40)
        expected = expect_neighbours(q, cos, sin)
        sys.modules["torch_npu"].npu_apply_rotary_pos_emb(
            q, k, neighbours(cos), neighbours(sin), layout="BNSD", rotary_mode="interleave"
        )
    assert row_error(q, expected) <= bound(BF16)


X, (C, S) = normal(2, 5, 3, 16), angles(1, 5, 1, 16)
Q, K, (QC, QS) = normal(2, 5, 4, 64), normal(2, 5, 1, 64), angles(2, 5, 1, 64)
INTER, (IC, IS) = normal(2, 3, 5, 64), angles(2, 1, 5, 64)
HALF = {"rotary_mode": "half"}
APPLY = {"layout": "BSND", "rotary_mode": "half"}
REFUSED: tuple[tuple[str, str, tuple[Any, ...], dict[str, Any], str], ...] = (
    (
        A2,
        "npu_rotary_mul",
        (X, C, S),
        {"rotary_mode": "quarter"},
        "needs rotary_mode to be one of 'half', 'interleave'",
    ),
    (
        A2,
        "npu_rotary_mul",
        (X[..., :15], C[..., :15], S[..., :15]),
        HALF,
        "needs an even last dimension of input below 896",
    ),
    (
        A2,
        "npu_rotary_mul",
        (normal(1, 1, 1, 896), *angles(1, 1, 1, 896)),
        HALF,
        "below 896; input is bfloat16[1, 1, 1, 896]",
    ),
    (A2, "npu_rotary_mul", (X, C[..., :8], S[..., :8]), HALF, "needs r1 to have the sizes of a layout's sequence"),
    (A2, "npu_rotary_mul", (X, C, S[:, :1]), HALF, "needs r1, r2 of one shape"),
    (A2, "npu_rotary_mul", (X[0, 0], C, S), HALF, "needs input of 3 or 4 dimensions"),
    (A2, "npu_rotary_mul", (X.double(), C, S), HALF, "needs input as f16, bf16, f32"),
    (A2, "npu_rotary_mul", (normal(1, 2, 1000, 2), *angles(1, 2, 1, 2)), HALF, "fewer than 1000 heads"),
    (A2, "npu_rotary_mul", (X, C, S), {**HALF, "rotate": normal(16, 16)}, "needs no rotate, which is not modelled"),
    (I310P, "npu_rotary_mul", (X, C, S), HALF, "needs input as f16, f32"),
    (I310P, "npu_rotary_mul", (X.half(), C, S), HALF, "needs a last dimension of input of 128"),
    (
        A2,
        "npu_apply_rotary_pos_emb",
        (Q, K, QC, QS),
        {**APPLY, "layout": "FOO"},
        "needs layout to be one of 'BSND', 'TND'",
    ),
    (A2, "npu_apply_rotary_pos_emb", (Q, K, QC, QS), {**APPLY, "layout": "BNSD"}, "layout is 'BNSD'"),
    (A2, "npu_apply_rotary_pos_emb", (Q, K, QC, QS), {**APPLY, "rotary_mode": "interleave"}, "to be one of 'half'"),
    (
        A5,
        "npu_apply_rotary_pos_emb",
        (Q, K, QC, QS),
        {**APPLY, "rotary_mode": "quarter"},
        "one of 'half', 'interleave'",
    ),
    (A2, "npu_apply_rotary_pos_emb", (Q, K, QC[:1], QS[:1]), APPLY, "needs sizes that differ in heads alone"),
    (A2, "npu_apply_rotary_pos_emb", (Q, K, QC.float(), QS.float()), APPLY, "needs query / key / cos / sin as"),
    (A2, "npu_apply_rotary_pos_emb", (Q[..., :32], K[..., :32], QC[..., :32], QS[..., :32]), APPLY, "64 or 128"),
    (A2, "npu_apply_rotary_pos_emb", (Q[:0], K[:0], QC[:0], QS[:0]), APPLY, "needs no empty query or key"),
    (
        A3,
        "npu_apply_rotary_pos_emb",
        (normal(1, 1, 150, 64), normal(1, 1, 8, 64), QC[:1, :1], QS[:1, :1]),
        APPLY,
        "196608 bytes",
    ),
    (I310P, "npu_apply_rotary_pos_emb", (Q, K, QC, QS), APPLY, "as f16/f16/f16/f16, f32/f32/f32/f32"),
    (
        A2,
        "npu_interleave_rope",
        (INTER.float(), IC.float(), IS.float()),
        {},
        "needs x / cos / sin as f16/f16/f16, bf16/bf16/bf16",
    ),
    (A2, "npu_interleave_rope", (INTER, IC.float(), IS.float()), {}, "needs x / cos / sin as"),
    (A2, "npu_interleave_rope", (INTER[..., :32], IC[..., :32], IS[..., :32]), {}, "needs a last dimension of x of 64"),
    (
        A2,
        "npu_interleave_rope",
        (INTER, IC.expand(2, 3, 5, 64), IS.expand(2, 3, 5, 64)),
        {},
        "needs cos [B, 1, S or 1, 64]",
    ),
    (
        A2,
        "npu_interleave_rope",
        (INTER.transpose(1, 2), IC[:, :, :3], IS[:, :, :3]),
        {},
        "needs x, cos, sin contiguous",
    ),
    (A2, "npu_interleave_rope", (INTER[0], IC[0], IS[0]), {}, "needs x of 4 dimensions"),
    (I310P, "npu_interleave_rope", (INTER.half(), IC.half(), IS.half()), {}, "is not documented for ascend-310p"),
)


@pytest.mark.parametrize("chip, op, arguments, keywords, words", REFUSED)
def test_refuses_with_words(chip: str, op: str, arguments: Any, keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(VendorRefusal) as refusal:
        getattr(DryVendor(chip), op)(*arguments, **keywords)
    assert str(refusal.value).startswith(f"{op}: ") and words in str(refusal.value)


@pytest.mark.parametrize(
    "op, arguments, keywords, name",
    (
        ("npu_rotary_mul", (X, C, S), {}, "rotary_mode"),
        ("npu_apply_rotary_pos_emb", (Q, K, QC, QS), {"rotary_mode": "half"}, "layout"),
        ("npu_apply_rotary_pos_emb", (Q, K, QC, QS), {"layout": "BSND"}, "rotary_mode"),
    ),
)
def test_modes_must_be_passed(op: str, arguments: Any, keywords: dict[str, Any], name: str) -> None:
    with pytest.raises(VendorRefusal, match=f"{name} is left out"):
        getattr(DryVendor(A2), op)(*arguments, **keywords)


def test_rotary_mul_refuses_angles_that_yarn_made_longer(emulator: Emulator) -> None:
    cos, sin = angles(1, 5, 1, 16, factor=1.2)
    with pytest.raises(VendorRefusal, match=r"values of r1 and r2 in \[-1, 1\]; YaRN's factor must be applied outside"):
        sys.modules["torch_npu"].npu_rotary_mul(X, cos, sin, rotary_mode="half")
