"""npu_grouped_matmul: each documented combination of dtypes against float64, group_list, layouts, refusals in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from porter.kernels.ascend.catalogue.vendor_op import VendorRefusal
from porter.kernels.ascend.emulator.grouped_matmul import unpacked
from porter.kernels.ascend.vendor import load_torch_npu

COUNTS = [3, 0, 1, 3]
FIXED = {"split_item": 2, "group_type": 0, "group_list_type": 1}


pytestmark = pytest.mark.usefixtures("emulator")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(low: int, high: int, *shape: int, seed: int = 1, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def grouped(x: torch.Tensor, weight: torch.Tensor, dtype: Any, counts: Any = COUNTS, **others: Any) -> Any:
    scalars = {n: others.pop(n) for n in list(others) if not isinstance(others[n], torch.Tensor)}
    lists = {name: [tensor] for name, tensor in others.items()}
    return load_torch_npu().npu_grouped_matmul(
        [x], [weight], group_list=torch.tensor(counts), output_dtype=dtype, **{**FIXED, **scalars}, **lists
    )[0]


def by_expert(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float64 product of each row with its expert's weight [K, N]."""
    experts = torch.tensor([e for e, count in enumerate(COUNTS) for _ in range(count)])
    return torch.einsum("rk,rkn->rn", x.double(), weight.double()[experts])


def of_rows(per_expert: torch.Tensor) -> torch.Tensor:
    return per_expert[[e for e, count in enumerate(COUNTS) for _ in range(count)]].double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_floats_accumulate_in_float32_and_round_once(dtype: torch.dtype) -> None:
    x, weight = draw(7, 33, dtype=dtype), draw(4, 33, 5, seed=1, dtype=dtype)
    bias = draw(4, 5, seed=2, dtype=dtype if dtype == torch.float16 else torch.float32)
    exact = by_expert(x, weight)
    bound = {"rtol": torch.finfo(dtype).eps, "atol": 2e-5}
    torch.testing.assert_close(grouped(x, weight, dtype).double(), exact, **bound)
    torch.testing.assert_close(grouped(x, weight, None, bias=bias).double(), exact + of_rows(bias), **bound)
    stored = weight.transpose(1, 2).contiguous()
    torch.testing.assert_close(grouped(x, stored.transpose(1, 2), dtype).double(), exact, **bound)
    assert torch.equal(grouped(x, weight, dtype, [3, 3, 4, 7], group_list_type=0), grouped(x, weight, dtype))


def test_int8_products_are_exact_and_scaled_once() -> None:
    x, weight = whole(-128, 128, 7, 300), whole(-128, 128, 4, 300, 6, seed=2)
    exact = by_expert(x, weight)
    assert torch.equal(grouped(x, weight, torch.int32).double(), exact)
    scale, per_token = draw(4, 6).abs(), draw(7, seed=5).abs()
    added = whole(-1000, 1000, 4, 6, dtype=torch.int32)
    half = grouped(x, weight, torch.float16, scale=scale / 1e5, per_token_scale=per_token, bias=added)
    wanted = (exact + of_rows(added)) * of_rows(scale / 1e5) * per_token.double()[:, None]
    torch.testing.assert_close(half.double(), wanted, rtol=2**-10, atol=1e-6)
    narrow = scale.bfloat16()
    brain = grouped(x, weight, torch.bfloat16, scale=narrow, per_token_scale=per_token)
    torch.testing.assert_close(
        brain.double(), exact * of_rows(narrow) * per_token.double()[:, None], rtol=2**-8, atol=1e-6
    )
    bits = (scale / 1e4).view(torch.int32).long()
    codes = grouped(x, weight, torch.int8, scale=bits)
    assert torch.equal(codes.double(), (exact.float() * of_rows(scale / 1e4).float()).round().clamp(-128, 127).double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dequantized_weights_are_rounded_to_the_dtype_of_x(dtype: torch.dtype) -> None:
    x, weight = draw(7, 40, dtype=dtype), whole(-128, 128, 4, 40, 6)
    scale, offset = draw(4, 6, seed=3).abs().to(dtype), draw(4, 6, seed=4).to(dtype)
    got = grouped(x, weight, dtype, antiquant_scale=scale, antiquant_offset=offset)
    plain = ((weight.float() + offset.float()[:, None]) * scale.float()[:, None]).to(dtype)
    torch.testing.assert_close(got.double(), by_expert(x, plain), rtol=torch.finfo(dtype).eps, atol=1e-2)


def test_int4_is_the_product_of_both_nibbles_with_the_bias_that_makes_up_for_the_shift() -> None:
    x, plain = whole(-127, 128, 7, 512), whole(-8, 8, 4, 512, 16)
    nibbles = (plain.int() & 15).unflatten(-1, (2, 8))
    packed = sum(nibbles[..., n] << (4 * n) for n in range(8)).to(torch.int32)
    assert torch.equal(unpacked(packed), plain)
    scale, per_token = draw(4, 2, 16).abs() / 100, draw(7, seed=2).abs()
    wide = plain.double() * scale.double().repeat_interleave(256, dim=1)
    bias = (8 * wide.sum(dim=1)).float()
    arguments = {"scale": scale.view(torch.int32).long(), "per_token_scale": per_token}
    got = grouped(x, packed, torch.bfloat16, bias=bias, **arguments)
    exact = by_expert(x, wide) * per_token.double()[:, None]
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-2)
    wrong = grouped(x, packed, torch.bfloat16, bias=torch.zeros_like(bias), **arguments)
    assert (wrong.double() - exact).norm() > 0.05 * exact.norm()
    with pytest.raises(VendorRefusal, match="group_list_type 1 for int4"):
        grouped(x, packed, torch.bfloat16, [3, 3, 4, 7], group_list_type=0, bias=bias, **arguments)
    with pytest.raises(VendorRefusal, match=r"scale \[experts, N\], or \[experts, K / 256, N\] of int4"):
        grouped(x, packed, torch.bfloat16, bias=bias, **{**arguments, "scale": arguments["scale"][:, :1]})
    with pytest.raises(VendorRefusal, match="x / weight / bias"):
        grouped(x, packed, torch.bfloat16, **arguments)


@pytest.mark.parametrize(
    ("counts", "kind"),
    [
        ([3, 3, 4, 7], 1),  # prefix sums given as counts
        ([3, 0, 1, 3], 0),  # counts given as prefix sums
        ([1, 1, 2, 3], 0),  # counts given as prefix sums that happen to rise: rows 3 to 6 would stay undefined
        ([3, 0, 1, 2], 1),
        ([3, 0, 1, 4], 1),
        ([4, -1, 1, 3], 1),
    ],
)
def test_a_group_list_that_does_not_cover_the_rows_is_refused(counts: list[int], kind: int) -> None:
    with pytest.raises(VendorRefusal, match="group_list to cover the rows of x that hold tokens"):
        grouped(draw(7, 8), draw(4, 8, 5), torch.float32, counts, group_list_type=kind)


def test_rows_of_no_expert_stay_undefined() -> None:
    x, weight = draw(7, 8), draw(4, 8, 5)
    x[5:] = torch.nan
    got = grouped(x, weight, torch.float32, [3, 0, 1, 1])
    assert got[5:].isnan().all() and got[:5].isfinite().all()
    codes = whole(-127, 127, 7, 8)
    codes[5:] = 0x7F
    assert (grouped(codes, whole(-8, 8, 4, 8, 5), torch.int32, [3, 0, 1, 1])[5:] == 0x7F7F7F7F).all()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"group_type": None}, "group_type 0, rows by expert (its default of None"),
        ({"group_type": -1}, "group_type 0"),
        ({"group_list_type": 2}, "group_list_type to be one of 0, 1"),
        ({"split_item": 0}, "split_item to be one of 2, 3"),
        ({"act_type": 5}, "act_type to be one of 0"),
        ({"bias": torch.zeros(4, 5, dtype=torch.bfloat16)}, "bf16/bf16/f32?"),
        ({"bias": torch.zeros(5)}, "bias [experts, N]"),
        ({"dtype": torch.float32}, "output_dtype as"),
        ({"counts": [3, 0, 4]}, "group_list int64 of one value for each expert"),
        ({"per_token_scale": torch.zeros(7)}, "x / weight / bias / scale"),
    ],
)
def test_refusals_in_words(changed: dict[str, Any], words: str) -> None:
    dtype, counts = changed.pop("dtype", torch.bfloat16), changed.pop("counts", COUNTS)
    x, weight = draw(7, 8, dtype=torch.bfloat16), draw(4, 8, 5, dtype=torch.bfloat16)
    with pytest.raises(VendorRefusal, match="npu_grouped_matmul: needs ") as refusal:
        grouped(x, weight, dtype, counts, **changed)
    assert words in str(refusal.value)


def test_shapes_are_refused_in_words() -> None:
    with pytest.raises(VendorRefusal, match=r"x \[rows, K\] and weight \[experts, K, N\]"):
        grouped(draw(7, 8), draw(4, 5, 8), torch.float32)
    with pytest.raises(VendorRefusal, match="x not transposed"):
        grouped(draw(8, 7).T, draw(4, 8, 5), torch.float32)
    with pytest.raises(VendorRefusal, match="x of at least one row"):
        grouped(draw(0, 8), draw(4, 8, 5), torch.float32)
    with pytest.raises(VendorRefusal, match="more than one expert where group_list_type is 1"):
        grouped(draw(7, 8), draw(1, 8, 5), torch.float32, [7])
    with pytest.raises(VendorRefusal, match="below 65536"):
        grouped(torch.zeros(7, 65536), torch.zeros(4, 65536, 1), torch.float32)
    with pytest.raises(VendorRefusal, match="one tensor in each of x, weight"):
        load_torch_npu().npu_grouped_matmul(
            [draw(7, 8)] * 2, [draw(4, 8, 5)], group_list=torch.tensor(COUNTS), output_dtype=None, **FIXED
        )


@pytest.mark.parametrize("name", [*FIXED, "output_dtype"])
def test_no_default_is_taken(name: str) -> None:
    given = {**FIXED, "output_dtype": None}
    del given[name]
    with pytest.raises(VendorRefusal, match=f"{name} is left out"):
        load_torch_npu().npu_grouped_matmul([draw(7, 8)], [draw(4, 8, 5)], group_list=torch.tensor(COUNTS), **given)


def test_weights_may_be_in_the_blocked_layout_and_activations_may_not() -> None:
    x, weight, counts = draw(16, 16, dtype=torch.bfloat16), draw(4, 16, 16, dtype=torch.bfloat16), [4] * 4
    blocked = load_torch_npu().npu_format_cast(weight, 29)
    assert torch.equal(grouped(x, blocked, torch.bfloat16, counts), grouped(x, weight, torch.bfloat16, counts))
    with pytest.raises(VendorRefusal, match="x is in FRACTAL_NZ"):
        grouped(load_torch_npu().npu_format_cast(x, 29), weight, torch.bfloat16, counts)
