"""The matrix product of int8 weights and activations that are quantized with a scale measured beforehand."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from porter.kernels.contract import Case, Op, Tolerance, compute_dtype
from porter.kernels.reference.draw import Draw
from porter.kernels.reference.linear import activations, int8_product, product_cost, product_shape

TOLERANCE = Tolerance(
    "the int8 products and the correction of the offset are added exactly and the oracle uses the same codes: only the "
    "scales' product, its product with the sum, and the bias round; with a bias the correction may be added in "
    "floating point, where it cancels against a sum of up to twice its size",
    terms=lambda x, *rest: 256,
)


def quantize_static(x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Codes [..., K] int8 of x: x / scale + offset, rounded half to even, saturated to [-128, 127].

    scale [1] float, offset [1] int8: one of each for the whole tensor. The quotient and the sum are float32 (float64
    for float64 x).
    """
    dtype = compute_dtype(x.dtype)
    codes = torch.round(x.to(dtype) / scale.to(dtype) + offset.to(dtype))
    return codes.clamp(-128, 127).to(torch.int8)


def offset_correction(weight: torch.Tensor, input_offset: torch.Tensor) -> torch.Tensor:
    """quant_bias [N] int32 = -input_offset * sum of the weight's row: what the offset adds to each product, taken away.

    That of AscendV1's W8A8 (msmodelslim, save/ascendv1.py) without the linear's own bias, which is exact in floating
    point and stays apart.
    """
    return (-weight.sum(dim=-1, dtype=torch.int64) * input_offset.to(torch.int64)).to(torch.int32)


def linear_w8a8_static(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor,
    input_offset: torch.Tensor,
    quant_bias: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """(codes @ weight^T + quant_bias) * (input_scale * weight_scale) + bias -> [..., N] in the dtype of x.

    x [..., K]; weight [N, K] int8; weight_scale [N], input_scale [1] float32; input_offset [1] int8; quant_bias [N]
    int32 (`offset_correction`); bias [N] or None. Codes by `quantize_static`; the integer sum is exact.
    """
    dtype = compute_dtype(x.dtype)
    return _product(x, weight, weight_scale, input_scale, input_offset, quant_bias, bias, dtype).to(x.dtype)


def linear_w8a8_static_exact(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor,
    input_offset: torch.Tensor,
    quant_bias: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """float64 oracle: the codes that the reference chooses, everything after them in float64."""
    return _product(x, weight, weight_scale, input_scale, input_offset, quant_bias, bias, torch.float64)


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor,
    input_offset: torch.Tensor,
    quant_bias: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    total = int8_product(quantize_static(x, input_scale, input_offset), weight) + quant_bias
    product = total.to(dtype) * (input_scale.to(dtype) * weight_scale.to(dtype))
    return product if bias is None else product + bias.to(dtype)


def _activations(draw: Draw) -> Iterator[tuple[str, torch.Tensor, int]]:
    yield from activations(draw)
    yield "one-sided", draw.normal(4, 64).abs(), 16


def _inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 33)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for index, (label, x, n) in enumerate(_activations(draw)):
        weight, scale = draw.int8_weight(n, x.shape[-1])
        # A scale that is no power of two, and an offset on either side of zero.
        input_scale = torch.full((1,), 7.3 / 255.0, dtype=wide)
        offset = torch.tensor([(-97, 0, 31)[index % 3]], dtype=torch.int8)
        correction = offset_correction(weight, offset)
        yield Case(f"{label} bias", (x, weight, scale, input_scale, offset, correction, draw.normal(n)))
        yield Case(label, (x, weight, scale, input_scale, offset, correction, None))
    weight, scale = draw.int8_weight(5, 64)
    weight[0, :] = -128
    ties = draw.normal(1, 64).sign() * torch.tensor([[1.5, 0.5] * 32], dtype=dtype)
    offset = torch.tensor([-128], dtype=torch.int8)
    ones = torch.ones(1, dtype=wide)
    yield Case(
        "codes halfway between integers", (ties, weight, scale, ones, offset, offset_correction(weight, offset), None)
    )


SCHEMA = (
    "(Tensor x, Tensor weight, Tensor weight_scale, Tensor input_scale, Tensor input_offset, Tensor quant_bias, "
    "Tensor? bias) -> Tensor"
)

OPS = (
    Op(
        "linear",
        "w8a8_static",
        SCHEMA,
        linear_w8a8_static,
        product_shape,
        _inputs,
        TOLERANCE,
        product_cost,
        exact=linear_w8a8_static_exact,
    ),
)
