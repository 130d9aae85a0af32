"""Gates: what a gated delta rule forgets and writes, and outputs multiplied by a sigmoid."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from porter.kernels.contract import Case, Cost, Op, Tolerance, compute_dtype, moved_bytes
from porter.kernels.reference.draw import Draw, spread, strided

DELTA_TOLERANCE = Tolerance(
    "a sum, two exponentials, a logarithm and a product per value; both outputs stay in the compute dtype. Softplus "
    "and sigmoid fall as e^x, so the rounding of x, at most |x| u, shows as a relative error of |x| u: |x| is at most "
    "64 in the cases",
    terms=lambda *arguments: 64.0**2,
    roundings=0.0,
)
SIGMOID_TOLERANCE = Tolerance(
    "an exponential, a division and a product per value, no sums; one rounding to the output dtype",
    terms=lambda *arguments: 64,
)


def delta_gates_softplus(
    a: torch.Tensor, b: torch.Tensor, log_decay_rate: torch.Tensor, time_bias: torch.Tensor, beta_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b [B, T, G, R], log_decay_rate and time_bias [G * R] -> (decay, beta), both [B, T, G * R].

    decay = -exp(log_decay_rate) * softplus(a + time_bias), the logarithm of what a step keeps of the state; beta =
    beta_scale * sigmoid(b), how much of the correction is written (Yang et al. 2024, Gated Delta Networks; upstream's
    names are A_log and dt_bias). Outputs are float32, float64 for float64: a rate rounded to 16 bits is applied at
    every step, so its error grows with the length.
    """
    dtype = compute_dtype(a.dtype)
    shifted = a.flatten(2).to(dtype) + time_bias.to(dtype)
    decay = -log_decay_rate.to(dtype).exp() * torch.nn.functional.softplus(shifted)
    return decay, beta_scale * torch.sigmoid(b.flatten(2).to(dtype))


def sigmoid_gate_standard(hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """hidden_states [..., H] * sigmoid(gate), gate [..., H] or [..., 1]: gated attention; a shared expert's gate."""
    dtype = compute_dtype(hidden_states.dtype)
    return (hidden_states.to(dtype) * torch.sigmoid(gate.to(dtype))).to(hidden_states.dtype)


def _delta_fake(a: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    shape, dtype = a.flatten(2).shape, compute_dtype(a.dtype)
    return a.new_empty(shape, dtype=dtype), a.new_empty(shape, dtype=dtype)


def _sigmoid_fake(hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return hidden_states.new_empty(hidden_states.shape)


def _delta_cost(a: torch.Tensor, b: torch.Tensor, *rest: object) -> Cost:
    width = torch.finfo(compute_dtype(a.dtype)).bits // 8
    return Cost(moved_bytes(a, b, *rest) + 2 * a.numel() * width, 12 * a.numel())


def _sigmoid_cost(hidden_states: torch.Tensor, gate: torch.Tensor) -> Cost:
    return Cost(moved_bytes(hidden_states, hidden_states, gate), hidden_states.numel() + 4 * gate.numel())


DELTA_SHAPES = ((1, 1, 1, 1), (1, 1, 16, 2), (2, 5, 1, 7), (3, 2, 5, 3), (1, 130, 4, 8), (0, 2, 2, 2))


def _delta_inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 71)
    for batch, tokens, groups, size in DELTA_SHAPES:
        heads = groups * size
        rates, time_bias = draw.normal(heads, scale=1.5), draw.normal(heads)
        a, b = (draw.normal(batch, tokens, groups, size, scale=3.0) for _ in range(2))
        label = f"B={batch} T={tokens} G={groups} R={size}"
        yield Case(label, (a, b, rates, time_bias, 1.0))
        yield Case(f"{label} beta to 2", (a, b, rates, time_bias, 2.0))
        fused = draw.normal(batch, tokens, groups, 2 * size)
        yield Case(f"{label} fused", (fused[..., size:], fused[..., :size], rates, time_bias, 1.0))
    rates, time_bias, a = draw.normal(6), draw.normal(6), draw.normal(2, 3, 2, 3)
    yield Case("+-60", (a.sign() * 60, a.sign() * 60, rates, time_bias, 1.0))
    yield Case("zeros", (a * 0, a * 0, rates, time_bias, 1.0))
    yield Case("last dimension strided", (strided(a), strided(a), rates, time_bias, 1.0))


def _sigmoid_inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 72)
    for shape in ((1, 1), (3, 7), (1, 1, 64), (2, 5, 127), (13, 256), (2, 1031), (0, 64)):
        hidden_states = draw.normal(*shape)
        yield Case(f"{list(shape)}", (hidden_states, draw.normal(*shape, scale=3.0)))
        yield Case(f"{list(shape)} one gate per row", (hidden_states, draw.normal(*shape[:-1], 1, scale=3.0)))
    yield Case("zeros, 1e4 and 1e-4", (draw.extreme_rows(66), draw.normal(4, 66)))
    yield Case("gates of +-80", (draw.normal(3, 34), draw.normal(3, 34, scale=80.0).clamp(-80, 80)))
    yield Case("rows apart", (spread(draw.normal(3, 5, 34)), spread(draw.normal(3, 5, 34))))
    yield Case("last dimension strided", (strided(draw.normal(3, 38)), strided(draw.normal(3, 38))))
    halves = draw.normal(2, 3, 4, 64)
    yield Case("gates beside queries", (draw.normal(2, 3, 4, 32), halves[..., 32:]))


DELTA_SCHEMA = (
    "(Tensor a, Tensor b, Tensor log_decay_rate, Tensor time_bias, float beta_scale) -> (Tensor, Tensor)"
)

OPS = (
    Op(
        "delta_gates",
        "softplus",
        DELTA_SCHEMA,
        delta_gates_softplus,
        _delta_fake,
        _delta_inputs,
        DELTA_TOLERANCE,
        _delta_cost,
    ),
    Op(
        "sigmoid_gate",
        "standard",
        "(Tensor hidden_states, Tensor gate) -> Tensor",
        sigmoid_gate_standard,
        _sigmoid_fake,
        _sigmoid_inputs,
        SIGMOID_TOLERANCE,
        _sigmoid_cost,
    ),
)
