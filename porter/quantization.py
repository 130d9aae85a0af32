"""Storing weights in fewer bits: the schemes that porter writes, and what each costs in accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from porter.activation_range import STEPS
from porter.errors import PorterError

INT8_MAX = 127
"""Largest code. -128 is never used: codes are symmetric, so a kernel may negate one, and pairs of products fit i16."""

INT4_MAX = 7
"""Largest code of int4. -8 is never used either."""

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""2**-126: kernels that flush subnormal numbers would read a smaller scale as zero."""

BLOCK_ELEMENTS = 1 << 18
"""Weights quantized at a time: their float32 copies stay in the cache, and never exist whole for a stack of experts."""


@dataclass(frozen=True)
class Scheme:
    """How a port stores the weights of its linear layers and experts, and in what its products take activations.

    `linears`, `experts` and `head` (the output embedding) name what apply_schemes makes of those modules; `attention`
    what it makes of the projections of latent attention, where that differs. `LEFT` are left in floating point.
    """

    name: str
    weight_dtype: torch.dtype
    activation: Literal["float", "int8", "int8 static"]
    description: str
    linears: str
    experts: str
    head: str
    attention: str = ""

    @property
    def calibrated(self) -> bool:
        """Whether activations are quantized with ranges that were measured beforehand."""
        return STATIC in (self.linears, self.attention)


STATIC = "w8a8_static"
LEFT = ""


def _plain(name: str, dtype: torch.dtype, activation: Literal["float", "int8"], description: str) -> Scheme:
    """The same for every module; in int8 the head's input feeds the logits directly, so it is not quantized."""
    head = "w8a16" if dtype == torch.int8 else name
    return Scheme(name, dtype, activation, description, linears=name, experts=name, head=head)


SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        s.name: s
        for s in (
            _plain("fp32", torch.float32, "float", "weights and activations in float32"),
            _plain("bf16", torch.bfloat16, "float", "weights in bfloat16; activations too, unless asked for float32"),
            _plain("w8a16", torch.int8, "float", "int8 weights, one float32 scale per output row; float activations"),
            _plain("w8a8", torch.int8, "int8", "int8 weights as w8a16; activations int8, one scale per token"),
            Scheme(
                "w8a8_static",
                torch.int8,
                "int8 static",
                "as w8a8; inputs of linear layers have one scale and offset for all tokens, measured by --calibration",
                linears=STATIC,
                experts="w8a8",
                head="w8a16",
            ),
            Scheme(
                "w4a8",
                torch.int8,
                "int8",
                "int4 weights of routed experts, one scale per output channel; all else as w8a8",
                linears="w8a8",
                experts="w4a8",
                head="w8a16",
            ),
            Scheme(
                "deepseek-w8a8",
                torch.int8,
                "int8",
                "latent attention as w8a8_static, MLPs and experts as w8a8; kv_b_proj and the head stay floats",
                linears="w8a8",
                experts="w8a8",
                head=LEFT,
                attention=STATIC,
            ),
        )
    }
)
ALIASES: Mapping[str, str] = MappingProxyType({"int8": "w8a16"})
"""int8 alone means the weights. Decoding is bound by reading them, so quantizing activations too gains nothing there,
and costs accuracy where a model has outlier activations (docs/measurements.md)."""


def scheme_named(name: str) -> Scheme:
    """The scheme of that name or alias. Raises PorterError naming the choices."""
    scheme = SCHEMES.get(ALIASES.get(name, name))
    if scheme is None:
        aliases = ", ".join(f"{alias} (= {of})" for alias, of in ALIASES.items())
        raise PorterError(f"--scheme {name}: is not known; choose one of {', '.join(SCHEMES)}, {aliases}")
    return scheme


def quantize_per_channel(weight: Tensor, largest: int = INT8_MAX) -> tuple[Tensor, Tensor]:
    """weight [..., N, K] of any floating-point dtype -> (codes int8 [..., N, K], scale float32 [..., N]).

    Symmetric: scale = absmax of the row / `largest` (127; 7 for int4), codes = weight / scale rounded half to even, in
    [-largest, largest]; the error of a weight is at most scale / 2. The arithmetic is float32 (float64 for float64
    weights), on the scale as stored.

    A row of zeros, or of no columns, gets scale 1: its codes are 0, so every scale gives exact zeros, and 1 keeps a
    kernel's reciprocal and its products with activation scales finite. Other scales are at least 2**-126; rows that
    small (absmax below 1.5e-36) lose relative, never absolute, accuracy. Raises PorterError for NaN, infinity, and
    float64 rows whose scale does not fit float32.
    """
    if not weight.is_floating_point() or weight.dim() < 2:
        raise PorterError(
            f"quantize_per_channel: weight is {weight.dtype} {list(weight.shape)}; expected floating point [..., N, K]"
        )
    columns = weight.shape[-1]
    rows = weight.reshape(-1, columns) if columns else weight.reshape(math.prod(weight.shape[:-1]), 0)
    codes = torch.empty(rows.shape, dtype=torch.int8, device=weight.device)
    scale = torch.ones(rows.shape[0], dtype=torch.float32, device=weight.device)
    step = max(1, BLOCK_ELEMENTS // max(columns, 1))
    for start in range(0, rows.shape[0] if columns else 0, step):
        block = slice(start, start + step)
        _quantize_rows(rows[block], codes[block], scale[block], largest)
    return codes.reshape(weight.shape), scale.reshape(weight.shape[:-1])


def _quantize_rows(rows: Tensor, codes: Tensor, scale: Tensor, most: int) -> None:
    wide = rows.to(torch.float64 if rows.dtype == torch.float64 else torch.float32)
    largest = wide.abs().amax(dim=-1)
    stored = (largest / most).to(torch.float32)
    if not bool(stored.isfinite().all()):
        raise PorterError(
            "quantize_per_channel: weight holds NaN, infinity or a row beyond float32; int8 cannot store it: "
            "give finite weights or another --scheme"
        )
    stored = torch.where(largest == 0, 1.0, stored.clamp(min=SMALLEST_SCALE))
    scale.copy_(stored)
    # No clamp: the scale and the quotient round once each, so |quotient| <= most (1 + 3 u), which rounds to most.
    codes.copy_((wide / stored.to(wide.dtype)[:, None]).round_())


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes int8 [..., N, K] times scale [..., N] -> [..., N, K] in `dtype`.

    One rounding: the product is taken in float32, which holds code and scale exactly (float64 for float64).
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (codes.to(wide) * scale.to(wide)[..., None]).to(dtype)


def expected_relative_error(scheme: str | Scheme, weight: Tensor, activation: Tensor | None = None) -> float:
    """Estimated relative L2 error that the scheme puts on x @ weight^T, for weight [..., N, K].

    Weights. Rounding to a grid of step s leaves errors uniform in [-s/2, s/2], of variance s^2 / 12; the estimate is
    the root of their sum over sum(w^2). In int8 s is the row's scale, in floating point the spacing of the dtype's
    values around each weight, and nothing where the weight's dtype fits already. Those errors are independent of x,
    and an x without a preferred direction carries the relative error of the weight over to the product unchanged.

    Activations (w8a8). The same step argument with the per-token scale max|x|/127: the relative error is
    crest / (127 sqrt(12)), where crest = max|x| / rms(x), independent of the weights' error, so squares add. crest is
    measured per row of `activation` [..., K] where it is given; else it is sqrt(2 ln 2K), the largest of K normal
    values: outlier channels cost more than that. w8a8_static: the step is (max - min) / 255 over all of `activation`,
    whose extremes its smallest rows pay for too; without it, that of as many normal values as K squared.

    An expectation, not a bound: a product that cancels (|Wx| far below its typical size) is relatively worse, so a
    budget multiplies it by a factor. 0 for a weight of zeros.
    """
    chosen = scheme_named(scheme) if isinstance(scheme, str) else scheme
    weight_error = _weight_error(chosen, weight)
    if chosen.activation == "float":
        return weight_error
    if chosen.activation == "int8 static":
        return math.hypot(weight_error, _static_error(activation, weight.shape[-1]))
    return math.hypot(weight_error, _crest(activation, weight.shape[-1]) / (INT8_MAX * math.sqrt(12.0)))


def _weight_error(scheme: Scheme, weight: Tensor) -> float:
    if torch.promote_types(weight.dtype, scheme.weight_dtype) == scheme.weight_dtype or weight.numel() == 0:
        return 0.0
    step = _int8_step if scheme.weight_dtype == torch.int8 else _float_step(scheme.weight_dtype)
    error = total = 0.0
    rows = weight.reshape(-1, weight.shape[-1])
    for block in rows.split(max(1, BLOCK_ELEMENTS // rows.shape[-1])):
        wide = block.double()
        error += float(step(wide).square().expand_as(wide).sum()) / 12.0
        total += float(wide.square().sum())
    return 0.0 if total == 0 else math.sqrt(error / total)


def _int8_step(rows: Tensor) -> Tensor:
    """The distance of neighbouring codes in each row [rows, 1]."""
    return rows.abs().amax(dim=-1, keepdim=True) / INT8_MAX


def _float_step(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The distance of neighbouring values of `dtype` around each weight: eps times the power of two below it."""

    def step(rows: Tensor) -> Tensor:
        exponent = torch.frexp(rows).exponent - 1
        return torch.where(rows == 0, 0.0, torch.ldexp(torch.full_like(rows, torch.finfo(dtype).eps), exponent))

    return step


def _static_error(activation: Tensor | None, columns: int) -> float:
    """Step of the measured range over sqrt(12), relative to the root mean square of the activations."""
    if activation is None:
        return 2.0 * math.sqrt(4.0 * math.log(2.0 * max(columns, 1))) / (STEPS * math.sqrt(12.0))
    wide = activation.double()
    size = float(wide.square().mean().sqrt()) if wide.numel() else 0.0
    span = float(wide.max().clamp_min(0.0) - wide.min().clamp_max(0.0)) if size else 0.0
    return span / (STEPS * math.sqrt(12.0) * size) if size else 0.0


def _crest(activation: Tensor | None, columns: int) -> float:
    """max|x| / rms(x): root mean square over the rows of `activation`, weighted by their energy as L2 errors are."""
    if activation is None:
        return math.sqrt(2.0 * math.log(2.0 * max(columns, 1)))
    wide = activation.double()
    energy = wide.square().sum()
    if wide.numel() == 0 or energy == 0:
        return 0.0
    return math.sqrt(float(wide.abs().amax(dim=-1).square().sum() * wide.shape[-1] / energy))
