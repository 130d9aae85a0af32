"""Products over int8 weights, by the vendor's pages: formulas in float64, the table of dtypes, each trap."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from porter.kernels.ascend.catalogue.vendor_op import FRACTAL_NZ, I310P, VendorRefusal
from porter.kernels.ascend.emulator.stand_in import Emulator, emulated_npu

F16, BF16, F32, I8, I32, I64 = torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int32, torch.int64


def codes(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed)).to(I8)


def scales(count: int, seed: int = 6) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) * 1e-3 + 1e-5


@pytest.mark.parametrize("out", [BF16, F16])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (3, 7, 5), (2, 301, 13)])
def test_integer_bias_is_added_before_the_scales(npu: Any, out: torch.dtype, m: int, k: int, n: int) -> None:
    x1, weight, scale, rows = codes(m, k), codes(n, k, seed=7), scales(n), scales(m, seed=8) * 100
    bias = torch.arange(n, dtype=I32) * 1000
    got = npu.npu_quant_matmul(x1, weight.t(), scale, pertoken_scale=rows, bias=bias, output_dtype=out)
    exact = (x1.double() @ weight.double().T + bias) * scale.double() * rows.double()[:, None]
    assert got.dtype == out
    torch.testing.assert_close(got.double(), exact, rtol=2.0**-8 if out == BF16 else 2.0**-11, atol=1e-7)


def test_a_floating_bias_is_added_after_the_scales(npu: Any) -> None:
    x1, weight, scale, bias = codes(3, 65), codes(9, 65), scales(9), torch.linspace(-2, 2, 9)
    got = npu.npu_quant_matmul(x1, weight.t(), scale, bias=bias, output_dtype=BF16)
    exact = x1.double() @ weight.double().T * scale.double() + bias.double()
    torch.testing.assert_close(got.double(), exact, rtol=2.0**-8, atol=1e-5)


def test_the_sum_is_exact_where_float32_sums_are_not(npu: Any) -> None:
    x1, weight = torch.full((1, 5001), 127, dtype=I8), torch.full((2, 5001), -128, dtype=I8)
    weight[1, 7] = 1
    got = npu.npu_quant_matmul(
        x1, weight.t(), torch.ones(1), bias=torch.tensor([5001 * 127 * 128] * 2, dtype=I32), output_dtype=BF16
    )
    assert got.tolist() == [[0.0, float(torch.tensor(127.0 * 129.0).to(BF16))]]


def test_without_a_token_scale_half_precision_takes_19_bits_of_the_scale(npu: Any) -> None:
    """npu_trans_quant_param keeps the upper 19 bits of a float32: 10 of its 23 fractional ones."""
    x1, weight, scale = codes(2, 33), codes(4, 33), torch.full((4,), 1.0 + 2.0**-11)
    cut = npu.npu_quant_matmul(x1, weight.t(), scale, output_dtype=F16)
    ones = npu.npu_quant_matmul(x1, weight.t(), torch.ones(4), output_dtype=F16)
    assert torch.equal(cut, ones)
    whole = npu.npu_quant_matmul(x1, weight.t(), scale, pertoken_scale=torch.ones(2), output_dtype=F16)
    assert not torch.equal(whole, ones)


def test_int8_output_is_offset_rounded_and_saturated(npu: Any) -> None:
    x1, weight, scale = codes(4, 31), codes(6, 31), torch.full((6,), 2.0**-9)
    got = npu.npu_quant_matmul(x1, weight.t(), scale, offset=torch.full((1,), 3.0), output_dtype=I8)
    exact = (x1.double() @ weight.double().T * 2.0**-9 + 3).round().clamp(-128, 127)
    assert torch.equal(got.double(), exact)


def test_the_output_dtype_is_always_passed(npu: Any) -> None:
    with pytest.raises(VendorRefusal, match="output_dtype is left out; its default None"):
        npu.npu_quant_matmul(codes(2, 4), codes(4, 3), scales(3))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x2": codes(3, 4)}, "needs x1 .* and x2"),
        ({"scale": scales(4)}, r"scale \[N\] or \[1\]"),
        (
            {"scale": scales(3).to(BF16), "output_dtype": F16},
            "scale / offset / bias / pertoken_scale / output_dtype as",
        ),
        ({"scale": scales(3).to(F16)}, "scale / offset"),
        ({"bias": torch.zeros(3, dtype=F16)}, "scale / offset"),
        ({"bias": torch.zeros(3), "output_dtype": F16}, "scale / offset"),
        ({"output_dtype": I32}, "scale / offset"),
        ({"output_dtype": 296}, "scale / offset"),
        ({"pertoken_scale": scales(3)}, r"pertoken_scale \[M\]"),
        ({"bias": torch.zeros(2)}, r"bias \[N\]"),
        ({"x1": torch.ones(2, 4, dtype=I32), "x2": torch.ones(4, 3, dtype=I32)}, "x1 / x2 as i8/i8"),
        ({"x1": codes(0, 4)}, "not empty"),
        ({"x2": codes(4, 6)[:, ::2]}, "x2 contiguous or the transpose"),
        ({"group_sizes": [1, 1, 32]}, "no x1_dtype or"),
    ],
)
def test_quant_matmul_refuses(npu: Any, change: dict[str, Any], words: str) -> None:
    given = {"x1": codes(2, 4), "x2": codes(4, 3), "scale": scales(3), "output_dtype": BF16} | change
    with pytest.raises(VendorRefusal, match=words):
        npu.npu_quant_matmul(**given)


def test_dimensions_end_at_65535(npu: Any) -> None:
    weight = torch.zeros(65536, 1, dtype=I8)
    with pytest.raises(VendorRefusal, match="at most 65535"):
        npu.npu_quant_matmul(codes(1, 1), weight.t(), torch.ones(1), output_dtype=BF16)
    with pytest.raises(VendorRefusal, match="at most 65535"):
        npu.npu_weight_quant_batchmatmul(torch.ones(1, 1, dtype=BF16), weight.t(), torch.ones(1, dtype=BF16))


def test_310p_takes_no_token_scale() -> None:
    with emulated_npu(I310P):
        import torch_npu

        with pytest.raises(VendorRefusal, match="scale / offset"):
            torch_npu.npu_quant_matmul(codes(2, 4), codes(4, 3), scales(3), pertoken_scale=scales(2), output_dtype=F16)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_the_offset_of_a_weight_is_added_to_its_codes(npu: Any, dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 70, generator=torch.Generator().manual_seed(1)).to(dtype), codes(5, 70)
    scale, offset = torch.full((5,), 2.0**-9, dtype=dtype), torch.full((5,), 4.0, dtype=dtype)
    bias = torch.linspace(-1, 1, 5).to(F32 if dtype == BF16 else F16)
    got = npu.npu_weight_quant_batchmatmul(x, weight.t(), scale, antiquant_offset=offset, bias=bias)
    exact = x.double() @ ((weight.double() + 4) * 2.0**-9).to(dtype).double().T + bias.double()
    torch.testing.assert_close(got.double(), exact, rtol=2.0**-8, atol=1e-4)
    minus = x.double() @ ((weight.double() - 4) * 2.0**-9).double().T + bias.double()
    assert float((minus - exact).abs().max()) > 1e-2


def test_groups_of_rows_share_a_scale(npu: Any) -> None:
    x, weight = torch.randn(2, 70, generator=torch.Generator().manual_seed(2)).to(BF16), codes(70, 3)
    scale = torch.tensor([[1.0, 2.0, 4.0], [0.5, 1.0, 2.0], [0.25, 8.0, 1.0]], dtype=BF16) * 2.0**-8
    got = npu.npu_weight_quant_batchmatmul(x, weight, scale, antiquant_group_size=32)
    rows = scale.double().repeat_interleave(32, 0)[:70]
    torch.testing.assert_close(
        got.double(), x.double() @ (weight.double() * rows).to(BF16).double(), rtol=2.0**-8, atol=1e-4
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.ones(2, 64)}, "x / weight as f16/i8, bf16/i8"),
        ({"antiquant_scale": torch.ones(3)}, "x / antiquant_scale / antiquant_offset as"),
        ({"antiquant_scale": torch.ones(2, dtype=BF16)}, r"antiquant_scale \[1\], \[N\]"),
        ({"bias": torch.ones(3, dtype=BF16)}, "x / bias as f16/f16, bf16/f32"),
        ({"antiquant_group_size": 48}, "antiquant_scale|antiquant_group_size"),
        ({"antiquant_group_size": 64, "antiquant_scale": torch.ones(1, 3, dtype=BF16)}, "a multiple of 32 in"),
        ({"x": torch.ones(2, 3, 64, dtype=BF16)}, "x of 2 dimensions"),
        ({"inner_precise": 1}, "inner_precise to be one of 0"),
        ({"quant_scale": torch.ones(3)}, "no quant_scale"),
        ({"antiquant_offset": torch.ones(1, dtype=BF16)}, "antiquant_offset of the shape"),
    ],
)
def test_the_weight_only_product_refuses(npu: Any, change: dict[str, Any], words: str) -> None:
    given = {"x": torch.ones(2, 64, dtype=BF16), "weight": codes(64, 3), "antiquant_scale": torch.ones(3, dtype=BF16)}
    with pytest.raises(VendorRefusal, match=words):
        npu.npu_weight_quant_batchmatmul(**(given | change))


def test_only_the_fully_quantized_product_reads_blocked_weights(npu: Any, emulator: Emulator) -> None:
    weight = codes(64, 32)
    emulator.formats.note(weight, FRACTAL_NZ)
    npu.npu_quant_matmul(codes(2, 64), weight, scales(32), output_dtype=BF16)
    with pytest.raises(VendorRefusal, match="weight is in FRACTAL_NZ"):
        npu.npu_weight_quant_batchmatmul(torch.ones(2, 64, dtype=BF16), weight, torch.ones(32, dtype=BF16))
