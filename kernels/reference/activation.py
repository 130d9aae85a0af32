"""Gated activations over the fused gate and up projections."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from porter.kernels.contract import Case, Cost, Op, Tolerance, compute_dtype, moved_bytes
from porter.kernels.reference.draw import Draw, spread, strided

TOLERANCE = Tolerance(
    "an exponential, a division and two products per value, no sums; one rounding to the output dtype",
    terms=lambda gate_up, *limit: 64,
)


def swiglu_standard(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [..., 2I], the gate first -> [..., I] (Shazeer 2020, SwiGLU without the matrices)."""
    gate, up = gate_up.to(compute_dtype(gate_up.dtype)).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def swiglu_clamped(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), as `swiglu_standard` else (DeepSeek-V4)."""
    gate, up = gate_up.to(compute_dtype(gate_up.dtype)).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)).to(gate_up.dtype)


def _fake(gate_up: torch.Tensor, *limit: float) -> torch.Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _cost(gate_up: torch.Tensor, *limit: float) -> Cost:
    return Cost(moved_bytes(gate_up) * 3 // 2, 3 * gate_up.numel())


def _inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 21)
    for shape in ((1, 2), (3, 14), (1, 1, 64), (2, 5, 254), (13, 512), (2, 2062), (0, 64)):
        yield Case(f"{list(shape)}", (draw.normal(*shape, scale=3.0),))
    yield Case("zeros, 1e4 and 1e-4", (draw.extreme_rows(66),))
    yield Case("gates of +-200", (draw.normal(3, 34, scale=100.0).clamp(-200, 200),))
    yield Case("rows apart", (spread(draw.normal(3, 5, 34)),))
    yield Case("last dimension strided", (strided(draw.normal(3, 38)),))


def _clamped_inputs(dtype: torch.dtype) -> Iterator[Case]:
    for case in _inputs(dtype):
        for limit in (0.7, 10.0):
            yield Case(f"{case.label} limit={limit}", (*case.arguments, limit))


CLAMPED = "(Tensor gate_up, float limit) -> Tensor"

OPS = (
    Op("swiglu", "standard", "(Tensor gate_up) -> Tensor", swiglu_standard, _fake, _inputs, TOLERANCE, _cost),
    Op("swiglu", "clamped", CLAMPED, swiglu_clamped, _fake, _clamped_inputs, TOLERANCE, _cost),
)
