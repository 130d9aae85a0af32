"""int8 weights: the codes of a float64 reference, and error estimates that the measured errors bear out."""

from __future__ import annotations

import math

import pytest
import torch

from porter.activation_range import Range
from porter.errors import PorterError
from porter.kernels.reference.linear_static import quantize_static
from porter.quantization import (
    BLOCK_ELEMENTS,
    INT4_MAX,
    SCHEMES,
    SMALLEST_SCALE,
    dequantize,
    expected_relative_error,
    quantize_per_channel,
    scheme_named,
)

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (3, 7), (1, 257), (257, 1), (2, 3, 5, 11), (0, 4), (4, 0), (3, 0, 4), (2, 1, 127)]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def relative(candidate: torch.Tensor, oracle: torch.Tensor) -> float:
    return float((candidate.double() - oracle.double()).norm() / oracle.double().norm())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Each weight is within half a step of its code's value, and no code is off by one from the exact quotient.

    The quotient rounds once in float32, so it may cross a tie by one unit roundoff of a value up to 127.
    """
    weight = draw(*shape, dtype=dtype)
    codes, scale = quantize_per_channel(weight)
    assert (codes.dtype, scale.dtype) == (torch.int8, torch.float32)
    assert (codes.shape, scale.shape) == (weight.shape, weight.shape[:-1])
    if weight.numel() == 0:
        assert torch.equal(scale, torch.ones_like(scale))
        return
    exact = weight.double().abs().amax(dim=-1) / 127
    torch.testing.assert_close(scale.double(), exact, rtol=2 * 2.0**-24, atol=0)
    quotient = weight.double() / scale.double()[..., None]
    assert float((quotient - codes.double()).abs().max()) <= 0.5 + 127 * 2.0**-23
    assert int(codes.abs().amax(dim=-1).min()) == 127, "each row uses the whole range"
    assert int(codes.min()) >= -127


def test_ties_round_to_even() -> None:
    weight = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -126.5]])
    codes, scale = quantize_per_channel(weight)
    assert scale.item() == 1.0
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126, -126]]


def test_minus_128_never_comes_up() -> None:
    """Scales round down as well as up, so quotients reach past 127: rows of many magnitudes try both."""
    weight = -torch.linspace(1.0, 2.0, 40_001).to(torch.float32)[:, None] * torch.tensor([1.0, 0.3])
    codes, _ = quantize_per_channel(weight)
    assert int(codes.min()) == -127


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_of_zeros(dtype: torch.dtype) -> None:
    weight = torch.zeros(3, 5, dtype=dtype)
    weight[1, 2] = -0.0
    weight[2, 3] = 2.0
    codes, scale = quantize_per_channel(weight)
    assert scale.tolist() == [1.0, 1.0, pytest.approx(2 / 127)]
    assert codes[:2].count_nonzero() == 0 and codes[2].tolist() == [0, 0, 0, 127, 0]
    assert torch.equal(dequantize(codes, scale)[:2], torch.zeros(2, 5))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_extremes(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    largest = min(limits.max, 1e38)
    weight = torch.tensor([[largest, -largest / 2], [limits.tiny, -limits.tiny], [limits.smallest_normal, 0.0]])
    weight = torch.tensor(weight.tolist(), dtype=dtype)
    codes, scale = quantize_per_channel(weight)
    assert bool(scale.isfinite().all()) and float(scale.min()) >= SMALLEST_SCALE
    assert codes[0].tolist() in ([127, -64], [127, -63])
    error = (dequantize(codes, scale, torch.float64) - weight.double()).abs()
    assert bool((error <= scale.double()[:, None] * (0.5 + 127 * 2.0**-23)).all())


def test_subnormal_rows_keep_a_normal_scale() -> None:
    weight = torch.tensor([[2.0**-149, -(2.0**-140)]])
    codes, scale = quantize_per_channel(weight)
    assert scale.item() == SMALLEST_SCALE and codes.tolist() == [[0, 0]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_refuses_values_that_are_no_numbers(value: float) -> None:
    weight = torch.ones(3, 4)
    weight[2, 1] = value
    with pytest.raises(
        PorterError,
        match=r"^quantize_per_channel: weight holds NaN, infinity or a row beyond float32; "
        "int8 cannot store it: give finite weights or another --scheme$",
    ):
        quantize_per_channel(weight)


def test_refuses_rows_beyond_float32_and_other_inputs() -> None:
    with pytest.raises(PorterError, match="a row beyond float32"):
        quantize_per_channel(torch.full((1, 2), 1e300, dtype=torch.float64))
    for weight in (torch.ones(3), torch.ones(2, 2, dtype=torch.int8), torch.tensor(1.0)):
        with pytest.raises(PorterError, match=r"expected floating point \[..., N, K\]"):
            quantize_per_channel(weight)


def test_blocks_and_strides_do_not_show() -> None:
    """Rows are quantized alone: in one call over several blocks, or row by row, from any view."""
    columns = 1021
    rows = BLOCK_ELEMENTS // columns * 2 + 3
    weight = draw(rows, columns)
    codes, scale = quantize_per_channel(weight)
    for row in (0, rows // 2 - 2, rows // 2 - 1, rows // 2, rows - 1):
        alone, its = quantize_per_channel(weight[row : row + 1])
        assert torch.equal(alone[0], codes[row]) and torch.equal(its[0], scale[row])
    view = draw(8, 6, 5).permute(2, 0, 1)[::2, :, 1::2]
    for left, right in zip(quantize_per_channel(view), quantize_per_channel(view.contiguous()), strict=True):
        assert torch.equal(left, right)
    wide = draw(2, BLOCK_ELEMENTS + 1)
    assert torch.equal(quantize_per_channel(wide)[0][1:], quantize_per_channel(wide[1:])[0])


def test_the_input_is_left_alone() -> None:
    weight = draw(4, 8)
    before = weight.clone()
    quantize_per_channel(weight)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dequantize_rounds_once(dtype: torch.dtype) -> None:
    codes, scale = quantize_per_channel(draw(2, 5, 13))
    exact = codes.double() * scale.double()[..., None]
    single = exact if dtype == torch.float64 else exact.to(torch.float32)
    assert torch.equal(dequantize(codes, scale, dtype), single.to(dtype))


def test_quantizing_again_gives_the_same_codes() -> None:
    """Dequantized rows have their largest code at 127, so scale and codes come back (the scale to its last bit)."""
    codes, scale = quantize_per_channel(draw(64, 33))
    again, its = quantize_per_channel(dequantize(codes, scale))
    assert torch.equal(again, codes)
    torch.testing.assert_close(its, scale, rtol=2.0**-22, atol=0)


def test_schemes() -> None:
    assert list(SCHEMES) == ["fp32", "bf16", "w8a16", "w8a8", "w8a8_static", "w4a8", "deepseek-w8a8"]
    assert all(scheme_named(name) is scheme and scheme.name == name for name, scheme in SCHEMES.items())
    assert scheme_named("int8") is SCHEMES["w8a16"]
    assert [s.weight_dtype for s in SCHEMES.values()] == [torch.float32, torch.bfloat16, *[torch.int8] * 5]
    assert [n for n, s in SCHEMES.items() if s.activation == "float"] == ["fp32", "bf16", "w8a16"]
    assert [n for n, s in SCHEMES.items() if s.calibrated] == ["w8a8_static", "deepseek-w8a8"]
    with pytest.raises(
        PorterError, match=r"^--scheme w4: is not known; choose one of fp32, bf16, w8a16, w8a8, w8a8_static, w4a8, deep"
    ):
        scheme_named("w4")


def test_int4_codes_end_at_seven_and_err_by_half_a_step() -> None:
    weight = draw(33, 65)
    codes, scale = quantize_per_channel(weight, INT4_MAX)
    assert int(codes.abs().max()) == 7 and torch.equal(codes.abs().amax(-1), torch.full((33,), 7, dtype=torch.int8))
    error = (dequantize(codes, scale, torch.float64) - weight.double()).abs()
    assert bool((error <= scale.double()[:, None] / 2 * (1 + 1e-6)).all())


@pytest.mark.parametrize(
    ("low", "high"), [(-1.0, 1.0), (-0.3, 7.0), (-5.0, 0.0), (0.0, 2.5), (-1e-30, 1e-30), (-3e4, 11.0)]
)
def test_a_range_uses_every_code_and_zero_is_one(low: float, high: float) -> None:
    scale, offset = Range(low, high).parameters()
    assert scale.shape == offset.shape == (1,) and scale.dtype == torch.float32 and offset.dtype == torch.int8
    ends = torch.tensor([low, 0.0, high], dtype=torch.float64)
    codes = quantize_static(ends.float(), scale, offset)
    assert codes[0] == -128 or low == 0.0 or abs(int(codes[0]) + 128) <= 1
    assert int(codes[2]) >= 126 and codes[1] == offset
    back = (codes.double() - offset.double()) * scale.double()
    assert bool(((back - ends).abs() <= scale.double()).all()) and back[1] == 0.0


def test_an_input_that_was_always_zero_has_a_scale() -> None:
    scale, offset = Range(0.0, 0.0).parameters()
    assert float(scale) == 1.0 and int(offset) == 0
    assert Range(-1.0, 2.0).joined(Range(-3.0, 1.0)) == Range(-3.0, 2.0)


def test_expected_product_error_with_a_measured_range() -> None:
    weight, x = draw(128, 256, seed=1), draw(64, 256, seed=2) + 0.5
    scale, offset = Range(float(x.min()), float(x.max())).parameters()
    codes = quantize_static(x, scale, offset)
    seen = (codes.double() - offset.double()) * scale.double()
    measured = relative(
        seen @ dequantize(*quantize_per_channel(weight), torch.float64).t(), x.double() @ weight.double().t()
    )
    assert expected_relative_error("w8a8_static", weight, x) == pytest.approx(measured, rel=0.15)
    centred = x - 0.5
    assert expected_relative_error("w8a8_static", weight, centred) > expected_relative_error("w8a8", weight, centred)


@pytest.mark.parametrize("shape", [(64, 512), (3, 64, 128), (1, 4096)], ids=str)
def test_expected_weight_error_is_the_measured_one(shape: tuple[int, ...]) -> None:
    """The squared error averages over thousands of codes: the estimate holds within 5 %."""
    weight = draw(*shape)
    measured = relative(dequantize(*quantize_per_channel(weight)), weight)
    assert expected_relative_error("w8a16", weight) == pytest.approx(measured, rel=0.05)


def test_expected_weight_error_of_rows_apart_in_size() -> None:
    weight = draw(64, 512) * torch.logspace(-4, 4, 64)[:, None]
    measured = relative(dequantize(*quantize_per_channel(weight)), weight)
    assert expected_relative_error("w8a16", weight) == pytest.approx(measured, rel=0.1)


def test_expected_rounding_error() -> None:
    weight = draw(512, 512, dtype=torch.float32)
    measured = relative(weight.to(torch.bfloat16), weight)
    assert expected_relative_error("bf16", weight) == pytest.approx(measured, rel=0.05)
    wide = draw(512, 512, dtype=torch.float64)
    assert expected_relative_error("fp32", wide) == pytest.approx(relative(wide.float(), wide), rel=0.05)
    for scheme, dtype in (("fp32", torch.bfloat16), ("fp32", torch.float16), ("bf16", torch.bfloat16)):
        assert expected_relative_error(scheme, weight.to(dtype)) == 0.0
    assert expected_relative_error("bf16", weight.half()) > 0, "float16 has mantissa bits that bfloat16 drops"


@pytest.mark.parametrize("columns", [64, 1024, 4096])
def test_expected_product_error_with_int8_activations(columns: int) -> None:
    """x @ w^T with both sides quantized, against float64: within 10 % with the activations given, 20 % without."""
    weight, x = draw(128, columns, seed=1), draw(64, columns, seed=2)
    codes, scale = quantize_per_channel(x)
    product = dequantize(codes, scale, torch.float64) @ dequantize(*quantize_per_channel(weight), torch.float64).t()
    measured = relative(product, x.double() @ weight.double().t())
    assert expected_relative_error("w8a8", weight, x) == pytest.approx(measured, rel=0.1)
    assert expected_relative_error("w8a8", weight) == pytest.approx(measured, rel=0.2)
    assert expected_relative_error("w8a8", weight) > expected_relative_error("w8a16", weight)


def test_outliers_in_activations_cost_more() -> None:
    weight, x = draw(128, 512, seed=1), draw(64, 512, seed=2)
    x[:, 7] *= 100
    codes, scale = quantize_per_channel(x)
    measured = relative(dequantize(codes, scale), x)
    both = expected_relative_error("w8a8", weight, x)
    activation = math.sqrt(both**2 - expected_relative_error("w8a16", weight) ** 2)
    assert activation == pytest.approx(measured, rel=0.2)
    assert activation > 2 * expected_relative_error("w8a16", weight)


def test_expected_error_of_nothing() -> None:
    for shape in ((0, 4), (4, 0), (3, 5)):
        assert expected_relative_error("w8a16", torch.zeros(shape)) == 0.0
    assert expected_relative_error("w8a8", torch.zeros(3, 5), torch.zeros(2, 5)) == 0.0
