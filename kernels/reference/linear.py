"""Matrix products, in floating point and over int8 weights with one scale per output channel."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from porter.kernels.contract import Case, Cost, Op, Tolerance, compute_dtype, moved_bytes
from porter.kernels.reference.draw import Draw, spread, strided

# 1024 products of at most 127 * 128 stay below 2^24, so a float32 product of that many terms is exact.
EXACT_BLOCK = 1024


def _terms(x: torch.Tensor, *rest: object) -> float:
    return 16.0 * (x.shape[-1] + 4)


TOLERANCE = Tolerance(
    "K products are added; the error of each partial sum is a roundoff of it, so random errors grow as sqrt(K), taken "
    "four times for outputs that cancel; one rounding to the output dtype",
    terms=_terms,
)
W8A16_TOLERANCE = Tolerance(
    "as a product of floats; the product of the codes may be rounded before it is scaled, where a chip has no float32 "
    "scales: a rounding more",
    terms=_terms,
    roundings=2.0,
)
INT8_TOLERANCE = Tolerance(
    "the int8 products are added exactly and the oracle uses the same codes: only the scales' products round",
    terms=lambda x, *rest: 64,
)


def linear_standard(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., K] @ weight [N, K]^T + bias [N] -> [..., N] in the dtype of x, which may be wider than the weight's.

    Where the dtypes are one, torch's own product serves: it accumulates fp16 and bf16 in float32 and rounds once, and
    the weight is not copied.
    """
    if x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype):
        return torch.nn.functional.linear(x, weight, bias)
    dtype = compute_dtype(x.dtype)
    product = torch.nn.functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return product.to(x.dtype)


def linear_w8a16(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """As `linear_standard` with the weight [N, K] int8 times weight_scale [N]."""
    dtype = compute_dtype(x.dtype)
    return linear_standard(x, weight.to(dtype) * weight_scale.to(dtype)[:, None], bias)


def quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [..., K] int8, scale [..., 1] float32 or float64): symmetric, scale = absmax / 127, codes = x / scale
    rounded half to even. A row of zeros has scale 0 and codes 0."""
    x = x.to(compute_dtype(x.dtype))
    if x.shape[-1] == 0:
        return x.to(torch.int8), x.new_zeros(*x.shape[:-1], 1)
    scale = x.abs().amax(dim=-1, keepdim=True) / 127.0
    codes = torch.round(x / torch.where(scale == 0, 1.0, scale)).clamp(-127, 127)
    return codes.to(torch.int8), scale


def int8_product(codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """codes [..., K] int8 @ weight [N, K] int8 ^T -> [..., N] int32, exact: the blocks of K are exact in float32."""
    total = torch.zeros(*codes.shape[:-1], weight.shape[0], dtype=torch.int32, device=codes.device)
    for start in range(0, codes.shape[-1], EXACT_BLOCK):
        block = slice(start, start + EXACT_BLOCK)
        product = torch.nn.functional.linear(codes[..., block].float(), weight[:, block].float())
        total += product.to(torch.int32)
    return total


def scaled_int8_product(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """int8 product times both scales, plus the bias, computed in `dtype`."""
    product = int8_product(codes, weight).to(dtype) * scale.to(dtype) * weight_scale.to(dtype)
    return product if bias is None else product + bias.to(dtype)


def linear_w8a8(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """As `linear_w8a16` with each row of x quantized by `quantize_per_token`; the integer product is exact."""
    codes, scale = quantize_per_token(x)
    return scaled_int8_product(codes, scale, weight, weight_scale, bias, scale.dtype).to(x.dtype)


def linear_w8a8_exact(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """float64 oracle: the codes and scales that the reference chooses, everything after them in float64."""
    codes, scale = quantize_per_token(x)
    return scaled_int8_product(codes, scale, weight, weight_scale, bias, torch.float64)


def product_shape(x: torch.Tensor, weight: torch.Tensor, *rest: object) -> torch.Tensor:
    """An empty [..., N] for x [..., K] and weight [N, K]."""
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def product_cost(x: torch.Tensor, weight: torch.Tensor, *rest: object) -> Cost:
    """Every operand read once and the output written; two operations a weight and row."""
    rows = x.shape[:-1].numel()
    output = rows * weight.shape[0] * x.element_size()
    return Cost(moved_bytes(x, weight, *rest) + output, 2 * rows * weight.numel())


def activations(draw: Draw) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Labelled x and N."""
    for shape, n in (((1, 1), 1), ((1, 7), 3), ((1, 1, 64), 64), ((3, 127), 31), ((2, 5, 96), 257), ((17, 33), 64)):
        yield f"{list(shape)} -> {n}", draw.normal(*shape), n
    yield "long rows", draw.normal(2, 2053), 37
    yield "no tokens", draw.normal(0, 64), 32
    yield "zeros, 1e4 and 1e-4", draw.extreme_rows(67), 29
    yield "rows apart", spread(draw.normal(2, 3, 64)), 32
    yield "last dimension strided", strided(draw.normal(3, 19)), 32


def _inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 31)
    for label, x, n in activations(draw):
        weight, bias = draw.normal(n, x.shape[-1], scale=x.shape[-1] ** -0.5), draw.normal(n)
        yield Case(f"{label} bias", (x, weight, bias))
        yield Case(label, (x, weight, None))
        if dtype == torch.float32:
            yield Case(f"{label} bias, bfloat16 weight", (x, weight.to(torch.bfloat16), bias))
    yield Case("weight rows apart", (draw.normal(3, 32), spread(draw.normal(16, 32)), None))


def _int8_inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 32)
    for label, x, n in activations(draw):
        weight, scale = draw.int8_weight(n, x.shape[-1])
        yield Case(f"{label} bias", (x, weight, scale, draw.normal(n)))
        yield Case(label, (x, weight, scale, None))
    weight, scale = draw.int8_weight(5, 64)
    weight[0, :] = -128
    ties = draw.normal(1, 64).sign() * torch.tensor([[1.0, 0.5] * 32], dtype=dtype)
    yield Case("codes halfway between integers", (ties, weight, scale, None))


STANDARD = "(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
INT8 = "(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias) -> Tensor"

OPS = (
    Op("linear", "standard", STANDARD, linear_standard, product_shape, _inputs, TOLERANCE, product_cost),
    Op("linear", "w8a16", INT8, linear_w8a16, product_shape, _int8_inputs, W8A16_TOLERANCE, product_cost),
    Op(
        "linear",
        "w8a8",
        INT8,
        linear_w8a8,
        product_shape,
        _int8_inputs,
        INT8_TOLERANCE,
        product_cost,
        exact=linear_w8a8_exact,
    ),
)
