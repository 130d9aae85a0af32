"""The operators that quantize, by the vendor's pages: formulas in float64, each rule, each default that is a trap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from porter.kernels.ascend.catalogue.quantization_dtypes import as_dtype
from porter.kernels.ascend.catalogue.vendor_op import A2, I310P, VendorRefusal
from porter.kernels.ascend.emulator.stand_in import emulated_npu

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture
def old_npu() -> Iterator[Any]:
    with emulated_npu(I310P):
        import torch_npu

        yield torch_npu


def drawn(*shape: int, dtype: torch.dtype = F32, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 97), (0, 8)], ids=str)
def test_dynamic_quant_is_the_row_over_its_largest_magnitude(
    npu: Any, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = drawn(*shape, dtype=dtype)
    codes, scale = npu.npu_dynamic_quant(x)
    assert codes.dtype == torch.int8 and scale.dtype == F32 and scale.shape == shape[:-1]
    expected = x.double().abs().amax(-1) / 127
    torch.testing.assert_close(scale.double(), expected, rtol=1e-6, atol=0)
    assert ((codes.double() * scale.double()[..., None] - x.double()).abs() <= scale[..., None] * 0.5001).all()


def test_dynamic_quant_smooths_first_and_a_row_of_zeros_has_codes_zero(npu: Any) -> None:
    x, smooth = drawn(3, 16, dtype=BF16), drawn(16, dtype=BF16, seed=4).abs()
    x[1] = 0
    codes, scale = npu.npu_dynamic_quant(x, smooth_scales=smooth)
    product = x.double() * smooth.double()
    assert not codes[1].any() and float(scale[1]) == 0
    assert ((codes.double() * scale.double()[:, None] - product).abs() <= scale[:, None] * 0.5001).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"input": torch.ones(2, 4)}, "needs input as f16, bf16; input is float32"),
        ({"input": torch.ones(4, dtype=BF16)}, "needs input of more than 1 dimension"),
        ({"input": torch.ones(2, 4, dtype=BF16), "smooth_scales": torch.ones(3, dtype=BF16)}, "smooth_scales of 1"),
        ({"input": torch.ones(2, 4, dtype=BF16), "group_index": torch.ones(1, dtype=torch.int32)}, "no group_index"),
        ({"input": torch.ones(2, 8, dtype=BF16), "dst_type": torch.quint4x2}, "dst_type to be one of None, i8"),
        ({"input": torch.ones(2, 4, dtype=BF16), "quant_mode": "pertensor"}, "quant_mode to be one of 'pertoken'"),
    ],
)
def test_dynamic_quant_refuses(npu: Any, arguments: dict[str, Any], words: str) -> None:
    x = arguments.pop("input")
    with pytest.raises(VendorRefusal, match=words):
        npu.npu_dynamic_quant(x, **arguments)


def test_dynamic_quant_is_not_documented_for_310p(old_npu: Any) -> None:
    with pytest.raises(VendorRefusal, match="not documented for ascend-310p"):
        old_npu.npu_dynamic_quant(torch.ones(2, 4, dtype=F16))


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_quantize_divides_adds_the_offset_and_saturates(npu: Any, dtype: torch.dtype) -> None:
    x = drawn(3, 5, 7, dtype=dtype) * 4
    scales, points = torch.full((7,), 0.03), torch.full((7,), -100, dtype=torch.int8)
    codes = npu.npu_quantize(x, scales, points, torch.qint8, axis=-1, div_mode=True)
    expected = (x.float() / scales - 100).double().round().clamp(-128, 127)
    assert torch.equal(codes.double(), expected) and bool((codes == -128).any())


def test_quantize_multiplies_by_reciprocals_without_div_mode(npu: Any) -> None:
    x, scale = drawn(2, 9, dtype=BF16), torch.full((9,), 32.0, dtype=BF16)
    multiplied = npu.npu_quantize(x, scale, None, torch.qint8, axis=-1, div_mode=False)
    divided = npu.npu_quantize(x, (1 / scale).float(), None, torch.qint8, axis=-1, div_mode=True)
    assert torch.equal(multiplied, divided)
    wrong = npu.npu_quantize(x, scale.float(), None, torch.qint8, axis=-1, div_mode=True)
    assert not torch.equal(wrong, divided), "a reciprocal with div_mode True is another result"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scales": torch.ones(1)}, "scales of 1 dimension with one value for each along axis"),
        ({"zero_points": torch.zeros(7)}, "zero_points as i8, u8, i32, bf16 where div_mode is True"),
        ({"scales": torch.ones(7, dtype=F16)}, "scales as f32, bf16"),
        ({"dtype": torch.quint8}, "dtype to be one of qint8"),
        ({"div_mode": False}, "scales .* of the dtype of input where div_mode is False"),
        (
            {"axis": 0, "div_mode": False, "scales": torch.ones(3, dtype=BF16)},
            "axis to be the last where div_mode is False",
        ),
    ],
)
def test_quantize_refuses(npu: Any, change: dict[str, Any], words: str) -> None:
    given = {"scales": torch.ones(7), "zero_points": None, "dtype": torch.qint8, "axis": -1, "div_mode": True} | change
    with pytest.raises(VendorRefusal, match=words):
        npu.npu_quantize(torch.ones(3, 7, dtype=BF16), **given)


@pytest.mark.parametrize("left_out", ["axis", "div_mode"])
def test_the_axis_and_mode_of_quantize_are_always_passed(npu: Any, left_out: str) -> None:
    given = {"axis": -1, "div_mode": True}
    del given[left_out]
    with pytest.raises(VendorRefusal, match=f"{left_out} is left out"):
        npu.npu_quantize(torch.ones(3, 7, dtype=BF16), torch.ones(7), None, torch.qint8, **given)


def test_int4_lies_low_nibble_first(npu: Any) -> None:
    weight = torch.tensor([[-8, -1, 0, 1, 2, 3, 6, 7], [7, 0, 0, 0, 0, 0, 0, -8]], dtype=torch.int32)
    packed = npu.npu_convert_weight_to_int4pack(weight)
    assert packed.shape == (2, 1) and packed.dtype == torch.int32
    back = [[(int(word) >> 4 * i) & 15 for i in range(8)] for word in packed[:, 0]]
    assert [[n - 16 * (n > 7) for n in row] for row in back] == weight.tolist()
    with pytest.raises(VendorRefusal, match="weight within"):
        npu.npu_convert_weight_to_int4pack(weight + 1)
    with pytest.raises(VendorRefusal, match="a multiple of 8"):
        npu.npu_convert_weight_to_int4pack(weight[:, :4].contiguous())
    with pytest.raises(VendorRefusal, match="weight contiguous"):
        npu.npu_convert_weight_to_int4pack(torch.zeros(8, 8, dtype=torch.int32).t())


def test_a_dtype_reaches_the_dispatcher_as_its_number() -> None:
    calls: list[Any] = []
    with emulated_npu(A2) as emulator:
        import torch_npu

        emulator.observers.append(lambda call, result: calls.append(call["dst_type"]))
        torch_npu.npu_dynamic_quant(torch.ones(2, 4, dtype=BF16), dst_type=torch.int8)
    assert calls == [1]
    with pytest.raises(KeyError):
        as_dtype(296)
