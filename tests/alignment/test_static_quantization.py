"""Static scales of activations and int4 experts before the aligner: their cost is expected, their faults are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from porter.activation_range import Range
from porter.alignment.calls import Call
from porter.alignment.quantization_cost import quantizes_activations, rounded_activations, rounded_per_token
from porter.alignment.quantized_weight import contradiction, dequantized, quantization_error
from porter.alignment.weights import beside_codes
from porter.kernels.reference.experts_w4a8 import make_scale_bias, pack_int4, pack_scale
from porter.kernels.reference.linear_static import offset_correction
from porter.models.linear import StaticInt8Linear
from porter.quantization import INT4_MAX, quantize_per_channel


def drawn(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def static_linear(found: Range) -> StaticInt8Linear:
    linear = StaticInt8Linear(16, 8, False, "w8a8_static", torch.float32)
    scale, offset = found.parameters()
    codes, weight_scale = quantize_per_channel(drawn(8, 16))
    correction = offset_correction(codes, offset)
    values = {"weight": codes, "weight_scale": weight_scale, "input_scale": scale, "input_offset": offset}
    for name, value in (values | {"quant_bias": correction}).items():
        setattr(linear, name, nn.Parameter(value, requires_grad=False))
    return linear


def seen(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    (call,) = rounded_activations(linear, [Call(0, 0, (x, torch.tensor([1])), {}, None)])
    assert call.args[1].dtype == torch.int64, "indices are no activations"
    rounded: torch.Tensor = call.args[0]
    return rounded


def test_a_source_sees_inputs_as_the_static_product_does() -> None:
    """The linear in float64 and the source on rounded inputs with the dequantized weight are the same."""
    x = drawn(3, 16, seed=4)
    linear = static_linear(Range(float(x.min()), float(x.max())))
    assert quantizes_activations(linear) == "linear"
    rounded = seen(linear, x)
    weight = linear.weight.double() * linear.weight_scale.double()[:, None]
    torch.testing.assert_close(linear.double()(x.double()), rounded @ weight.T, rtol=1e-12, atol=1e-12)
    assert not torch.equal(rounded, rounded_per_token(x))


@pytest.mark.parametrize(("factor", "own"), [(1.0, True), (3.0, True), (0.9, True), (10.0, False), (0.3, False)])
def test_a_scale_that_does_not_fit_the_inputs_is_not_what_the_source_sees(factor: float, own: bool) -> None:
    """A range three times as wide as the inputs costs 1.6 bits, as other data may; ten times or a third is a fault."""
    x = drawn(8, 64, seed=4)
    low, high = float(x.min()), float(x.max())
    linear = static_linear(Range(low * factor, high * factor))
    scale, offset = (t.double() for t in (linear.input_scale, linear.input_offset))
    mine = ((x.double() / scale + offset).round().clamp(-128, 127) - offset) * scale
    assert torch.equal(seen(linear, x), mine) == own


def test_a_correction_that_contradicts_its_codes_is_found() -> None:
    linear = static_linear(Range(-1.0, 5.0))
    beside: dict[str, Any] = {n: getattr(linear, n) for n in ("input_scale", "input_offset", "quant_bias")}
    assert contradiction(linear.weight, linear.weight_scale, beside) == ""
    for wrong in (torch.zeros_like(linear.quant_bias), -linear.quant_bias, linear.quant_bias + 1):
        found = contradiction(linear.weight, linear.weight_scale, {**beside, "quant_bias": wrong})
        assert found.startswith("quant_bias is not -input_offset")


@pytest.mark.parametrize("inputs", [96, 512])
def test_int4_experts_are_read_back_and_cost_what_four_bits_do(inputs: int) -> None:
    weight, groups = drawn(3, 10, inputs), 1 if inputs % 256 else inputs // 256
    codes, scale = quantize_per_channel(weight, INT4_MAX)
    grouped = scale[..., None, :].expand(3, groups, 10)
    packed, bits = pack_int4(codes), pack_scale(grouped)
    found = dequantized(packed, bits)
    assert found.values is not None and found.grid is not None
    assert torch.equal(found.values, codes.float() * scale[..., None])
    error = float((found.values.double() - weight.double()).norm() / weight.double().norm())
    expected = quantization_error(weight, found.grid, torch.int8, found.levels)
    assert 0.3 * expected < error < expected
    swapped = dequantized((packed << 4) | ((packed >> 4) & 15), bits).values
    assert swapped is not None
    assert float((swapped - weight).norm() / weight.norm()) > 3 * expected, "the other nibble order is another weight"
    bias = make_scale_bias(codes, grouped)
    assert contradiction(packed, bits, {"scale_bias": bias}) == ""
    assert contradiction(packed, bits, {"scale_bias": bias / 8}).startswith("scale_bias is not 8 times")
    assert "does not fit" in dequantized(packed, bits[..., :4]).why


def test_what_lies_beside_codes_is_compared_with_them() -> None:
    assert {"a.weight_scale", "a.input_scale", "a.input_offset", "a.quant_bias"} <= set(beside_codes("a.weight"))
    assert beside_codes("e.down_proj")[-1] == "e.down_proj_scale_bias"
