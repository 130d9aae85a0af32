"""RMS norms: x / sqrt(mean(x^2) + eps) * weight, and its fused and gated forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from porter.kernels.contract import Case, Cost, Op, Tolerance, compute_dtype, moved_bytes
from porter.kernels.reference.draw import Draw, spread, strided

TOLERANCE = Tolerance(
    "the sum of H squares, whose relative error grows as sqrt(H) unit roundoffs, then a few products; one rounding to "
    "the output dtype",
    terms=lambda hidden_states, *rest: hidden_states.shape[-1] + 16,
)
ADD_TOLERANCE = Tolerance(
    "as rms_norm, with one more rounding: the sum is stored in the output dtype and normalised as stored",
    terms=lambda hidden_states, *rest: hidden_states.shape[-1] + 16,
    roundings=2.0,
)


def _normalised(hidden_states: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., H] in the compute dtype, without a weight."""
    x = hidden_states.to(compute_dtype(hidden_states.dtype))
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rms_norm_standard(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """hidden_states [..., H], weight [H] -> [..., H] of the same dtype (Zhang and Sennrich 2019, equation 4)."""
    normalised = _normalised(hidden_states, eps)
    return (normalised * weight.to(normalised.dtype)).to(hidden_states.dtype)


def rms_norm_unweighted(hidden_states: torch.Tensor, eps: float) -> torch.Tensor:
    """As `rms_norm_standard` with no weight (DeepSeek-V4)."""
    return _normalised(hidden_states, eps).to(hidden_states.dtype)


def rms_norm_zero_centered(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `rms_norm_standard` with 1 + weight (Qwen3-Next, Gemma)."""
    normalised = _normalised(hidden_states, eps)
    return (normalised * (1.0 + weight.to(normalised.dtype))).to(hidden_states.dtype)


def rms_norm_gated(hidden_states: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
    """norm(hidden_states) * weight * silu(gate); gate [..., H] (Qwen3-Next's gated delta net)."""
    normalised = _normalised(hidden_states, eps)
    opened = torch.nn.functional.silu(gate.to(normalised.dtype))
    return (normalised * weight.to(normalised.dtype) * opened).to(hidden_states.dtype)


def add_rms_norm_standard(
    hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of the sum, the sum) of hidden_states and residual [..., H]; the norm is of the sum as it is stored."""
    total = hidden_states + residual
    return rms_norm_standard(total, weight, eps), total


def add_rms_norm_zero_centered(
    hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `add_rms_norm_standard` with 1 + weight."""
    total = hidden_states + residual
    return rms_norm_zero_centered(total, weight, eps), total


def _same(hidden_states: torch.Tensor, *rest: object) -> torch.Tensor:
    return hidden_states.new_empty(hidden_states.shape)


def _same_twice(hidden_states: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    return hidden_states.new_empty(hidden_states.shape), hidden_states.new_empty(hidden_states.shape)


def _cost(hidden_states: torch.Tensor, *rest: object) -> Cost:
    return Cost(moved_bytes(hidden_states, hidden_states, *rest), 4 * hidden_states.numel())


def _add_cost(hidden_states: torch.Tensor, residual: torch.Tensor, *rest: object) -> Cost:
    moved = moved_bytes(hidden_states, hidden_states, hidden_states, residual, *rest)
    return Cost(moved, 5 * hidden_states.numel())


def _gated_cost(hidden_states: torch.Tensor, *rest: object) -> Cost:
    return Cost(moved_bytes(hidden_states, hidden_states, *rest), 9 * hidden_states.numel())


def _rows(draw: Draw) -> Iterator[tuple[str, torch.Tensor]]:
    """Labelled hidden states."""
    for shape in ((1, 1), (3, 7), (1, 64), (2, 5, 127), (13, 256), (2, 1031), (0, 64), (2, 0, 16)):
        yield f"{list(shape)}", draw.normal(*shape)
    yield "zeros, 1e4 and 1e-4", draw.extreme_rows(67)
    yield "rows apart", spread(draw.normal(3, 5, 33))
    yield "heads transposed", draw.normal(2, 3, 4, 32).transpose(1, 2)
    yield "last dimension strided", strided(draw.normal(3, 19))


def _norm_inputs(centre: float) -> Callable[[torch.dtype], Iterator[Case]]:
    def inputs(dtype: torch.dtype) -> Iterator[Case]:
        draw = Draw(dtype, 11)
        for label, hidden_states in _rows(draw):
            weight = draw.normal(hidden_states.shape[-1], scale=0.2, shift=centre)
            for eps in (1e-6, 1e-5):
                yield Case(f"{label} eps={eps}", (hidden_states, weight, eps))
            if dtype == torch.bfloat16 and hidden_states.numel():
                yield Case(f"{label} float32 weight", (hidden_states, weight.float() * 1.001, 1e-6))

    return inputs


def _unweighted_inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 14)
    for label, hidden_states in _rows(draw):
        yield Case(label, (hidden_states, 1e-6))


def _add_inputs(centre: float) -> Callable[[torch.dtype], Iterator[Case]]:
    def inputs(dtype: torch.dtype) -> Iterator[Case]:
        draw = Draw(dtype, 12)
        for label, hidden_states in _rows(draw):
            residual = draw.normal(*hidden_states.shape, scale=2.0)
            weight = draw.normal(hidden_states.shape[-1], scale=0.2, shift=centre)
            yield Case(label, (hidden_states, residual, weight, 1e-6))

    return inputs


def _gated_inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 13)
    for label, hidden_states in _rows(draw):
        gate = draw.normal(*hidden_states.shape, scale=3.0)
        weight = draw.normal(hidden_states.shape[-1], scale=0.2, shift=1.0)
        yield Case(label, (hidden_states, weight, gate, 1e-6))


NORM = "(Tensor hidden_states, Tensor weight, float eps) -> Tensor"
UNWEIGHTED = "(Tensor hidden_states, float eps) -> Tensor"
GATED = "(Tensor hidden_states, Tensor weight, Tensor gate, float eps) -> Tensor"
ADD = "(Tensor hidden_states, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)"

OPS = (
    Op("rms_norm", "standard", NORM, rms_norm_standard, _same, _norm_inputs(1.0), TOLERANCE, _cost),
    Op("rms_norm", "zero_centered", NORM, rms_norm_zero_centered, _same, _norm_inputs(0.0), TOLERANCE, _cost),
    Op("rms_norm", "unweighted", UNWEIGHTED, rms_norm_unweighted, _same, _unweighted_inputs, TOLERANCE, _cost),
    Op("rms_norm", "gated", GATED, rms_norm_gated, _same, _gated_inputs, TOLERANCE, _gated_cost),
    Op("add_rms_norm", "standard", ADD, add_rms_norm_standard, _same_twice, _add_inputs(1.0), ADD_TOLERANCE, _add_cost),
    Op(
        "add_rms_norm",
        "zero_centered",
        ADD,
        add_rms_norm_zero_centered,
        _same_twice,
        _add_inputs(0.0),
        ADD_TOLERANCE,
        _add_cost,
    ),
)
