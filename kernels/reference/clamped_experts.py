"""Routed experts whose gated activation is clamped (DeepSeek-V4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from porter.kernels.contract import Arguments, Case, Cost, Op, compute_dtype
from porter.kernels.reference.activation import swiglu_clamped
from porter.kernels.reference.experts import OPS as EXPERTS
from porter.kernels.reference.experts import ExpertMLP, routed_sum
from porter.kernels.reference.linear import linear_w8a8, linear_w8a8_exact, linear_w8a16

PLAIN = {op.variant: op for op in EXPERTS}
LIMITS = (0.4, 10.0)
"""One that most activations of the cases pass, one that few do."""


def experts_clamped(
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    """As experts/standard with swiglu/clamped. Equals transformers' DeepseekV4Experts."""

    def mlp(x: torch.Tensor, expert: int) -> torch.Tensor:
        gated = swiglu_clamped(torch.nn.functional.linear(x, gate_up[expert].to(x.dtype)), limit)
        return torch.nn.functional.linear(gated, down[expert].to(x.dtype))

    dtype = compute_dtype(hidden.dtype)
    return routed_sum(hidden, top_k_index, top_k_weights, gate_up.shape[0], mlp, dtype).to(hidden.dtype)


def _int8_mlp(product: Callable[..., torch.Tensor], *arguments: torch.Tensor | float) -> ExpertMLP:
    gate_up, gate_up_scale, down, down_scale, limit = arguments
    assert isinstance(gate_up, torch.Tensor) and isinstance(gate_up_scale, torch.Tensor)
    assert isinstance(down, torch.Tensor) and isinstance(down_scale, torch.Tensor) and isinstance(limit, float)

    def mlp(x: torch.Tensor, expert: int) -> torch.Tensor:
        gated = swiglu_clamped(product(x, gate_up[expert], gate_up_scale[expert], None), limit)
        return product(gated.to(x.dtype), down[expert], down_scale[expert], None)

    return mlp


def experts_clamped_w8a16(
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    """As experts/w8a16 with swiglu/clamped."""
    mlp = _int8_mlp(linear_w8a16, gate_up, gate_up_scale, down, down_scale, limit)
    dtype = compute_dtype(hidden.dtype)
    return routed_sum(hidden, top_k_index, top_k_weights, gate_up.shape[0], mlp, dtype).to(hidden.dtype)


def experts_clamped_w8a8(
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    """As experts/w8a8 with swiglu/clamped."""
    mlp = _int8_mlp(linear_w8a8, gate_up, gate_up_scale, down, down_scale, limit)
    dtype = compute_dtype(hidden.dtype)
    return routed_sum(hidden, top_k_index, top_k_weights, gate_up.shape[0], mlp, dtype).to(hidden.dtype)


def experts_clamped_w8a8_exact(
    hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, *weights: torch.Tensor
) -> torch.Tensor:
    """float64 oracle: codes chosen in the compute dtype, everything else in float64."""
    mlp = _int8_mlp(linear_w8a8_exact, *weights)
    return routed_sum(hidden, top_k_index, top_k_weights, weights[0].shape[0], mlp, torch.float64)


def _variant(plain: Op, reference: Callable[..., torch.Tensor], exact: Callable[..., torch.Tensor] | None) -> Op:
    """The Op like `plain` with a limit after its arguments."""

    def inputs(dtype: torch.dtype) -> Iterator[Case]:
        for number, case in enumerate(plain.inputs(dtype)):
            limit = LIMITS[number % len(LIMITS)]
            yield Case(f"{case.label} limit={limit}", (*case.arguments, limit))

    def cost(*arguments: torch.Tensor) -> Cost:
        return plain.cost(*arguments[:-1])

    def fake(hidden: torch.Tensor, *rest: object) -> torch.Tensor:
        return hidden.new_empty(hidden.shape)

    def error(candidate: torch.Tensor, oracle: torch.Tensor, *arguments: Arguments) -> float:
        return plain.error(candidate, oracle, *arguments[:-1])

    variant = "clamped" if plain.variant == "standard" else f"clamped_{plain.variant}"
    schema = plain.schema.replace(") ->", ", float limit) ->")
    terms = plain.tolerance.terms
    tolerance = type(plain.tolerance)(
        f"{plain.tolerance.argument}; clamping adds no error",
        lambda *arguments: terms(*arguments[:-1]),
        plain.tolerance.roundings,
        plain.tolerance.floor,
    )
    return Op(plain.name, variant, schema, reference, fake, inputs, tolerance, cost, error, exact)


OPS = (
    _variant(PLAIN["standard"], experts_clamped, None),
    _variant(PLAIN["w8a16"], experts_clamped_w8a16, None),
    _variant(PLAIN["w8a8"], experts_clamped_w8a8, experts_clamped_w8a8_exact),
)
