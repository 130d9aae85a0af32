"""The routed experts of a mixture: one gated MLP per expert over the tokens routed to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from porter.kernels.contract import Case, Cost, Op, Tolerance, compute_dtype, moved_bytes
from porter.kernels.reference.activation import swiglu_standard
from porter.kernels.reference.draw import Draw, spread
from porter.kernels.reference.linear import linear_w8a8, linear_w8a8_exact, linear_w8a16

ExpertMLP = Callable[[torch.Tensor, int], torch.Tensor]


def _terms(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *expert_weights: torch.Tensor) -> float:
    down = expert_weights[-1] if expert_weights[-1].dim() == 3 else expert_weights[-2]
    return 64.0 * (hidden.shape[-1] + down.shape[-1] + index.shape[-1])


TOLERANCE = Tolerance(
    "two chained products over H and I and a sum over k experts, in the compute dtype; the gated activation may be "
    "rounded to the activation dtype between the products; one rounding at the end",
    terms=_terms,
    roundings=2.0,
)
INT8_TOLERANCE = Tolerance(
    "the integer products are exact, but the second quantization sees activations with float32 rounding, so a code "
    "within that distance of a tie may be one of 127 off, in one value of a row",
    terms=_terms,
    roundings=2.0,
    floor=2e-3,
)


def routed_sum(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    mlp: ExpertMLP,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[T, H] in `dtype`: sum over k of weights * mlp(tokens in the compute dtype, expert).

    Expert numbers outside [0, experts) belong to other devices and add nothing.
    """
    total = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    for expert in torch.unique(index).tolist():
        if 0 <= expert < experts:
            token, position = torch.where(index == expert)
            output = mlp(hidden[token].to(compute_dtype(hidden.dtype)), expert).to(dtype)
            total.index_add_(0, token, output * weights[token, position, None].to(dtype))
    return total


def experts_standard(
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """hidden [T, H], top_k_index [T, k] int64, top_k_weights [T, k], gate_up [E, 2I, H] (gate rows first), down
    [E, H, I] -> [T, H]: sum over k of weight * down(swiglu(gate_up(hidden))). Rounded once, at the end.

    Equals transformers' DeepseekV3Experts and Qwen3MoeExperts.
    """

    def mlp(x: torch.Tensor, expert: int) -> torch.Tensor:
        gated = swiglu_standard(torch.nn.functional.linear(x, gate_up[expert].to(x.dtype)))
        return torch.nn.functional.linear(gated, down[expert].to(x.dtype))

    dtype = compute_dtype(hidden.dtype)
    return routed_sum(hidden, top_k_index, top_k_weights, gate_up.shape[0], mlp, dtype).to(hidden.dtype)


def _int8_mlp(product: Callable[..., torch.Tensor], *weights: torch.Tensor) -> ExpertMLP:
    """One expert whose two linears are `product`, over gate_up, gate_up_scale, down and down_scale."""
    gate_up, gate_up_scale, down, down_scale = weights

    def mlp(x: torch.Tensor, expert: int) -> torch.Tensor:
        gated = swiglu_standard(product(x, gate_up[expert], gate_up_scale[expert], None))
        return product(gated.to(x.dtype), down[expert], down_scale[expert], None)

    return mlp


def experts_w8a16(
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
) -> torch.Tensor:
    """As `experts_standard` with int8 gate_up and down times gate_up_scale [E, 2I] and down_scale [E, H]."""
    mlp, dtype = _int8_mlp(linear_w8a16, gate_up, gate_up_scale, down, down_scale), compute_dtype(hidden.dtype)
    return routed_sum(hidden, top_k_index, top_k_weights, gate_up.shape[0], mlp, dtype).to(hidden.dtype)


def experts_w8a8(
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
) -> torch.Tensor:
    """As `experts_w8a16` with hidden, and then the gated activation, quantized per token as in `linear_w8a8`."""
    mlp, dtype = _int8_mlp(linear_w8a8, gate_up, gate_up_scale, down, down_scale), compute_dtype(hidden.dtype)
    return routed_sum(hidden, top_k_index, top_k_weights, gate_up.shape[0], mlp, dtype).to(hidden.dtype)


def experts_w8a8_exact(
    hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, *weights: torch.Tensor
) -> torch.Tensor:
    """float64 oracle: codes chosen in the compute dtype, everything else in float64."""
    mlp = _int8_mlp(linear_w8a8_exact, *weights)
    return routed_sum(hidden, top_k_index, top_k_weights, weights[0].shape[0], mlp, torch.float64)


def _fake(hidden: torch.Tensor, *rest: object) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


def _cost(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *stacked: torch.Tensor) -> Cost:
    """Reads the weights of the experts that are hit: at most one per token and choice."""
    experts = stacked[0].shape[0]
    hit = min(experts, index.numel())
    per_expert = sum(w[0].numel() for w in stacked if w.dim() == 3)
    moved = moved_bytes(hidden, hidden, index, weights) + moved_bytes(*stacked) * hit // experts
    return Cost(moved, 2 * index.numel() * per_expert)


SHAPES = (  # tokens, hidden size, intermediate size, experts, top_k
    (1, 1, 1, 1, 1),
    (1, 64, 32, 8, 2),
    (5, 33, 17, 4, 4),
    (13, 96, 61, 16, 3),
    (37, 32, 64, 3, 1),
    (0, 32, 16, 4, 2),
)


def _routing(draw: Draw, tokens: int, experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = draw.uniform(tokens, experts)
    weights, index = scores.topk(top_k, dim=-1)
    return index, weights / weights.sum(dim=-1, keepdim=True)


def _activations(draw: Draw) -> Iterator[tuple[str, tuple[torch.Tensor, ...], int, int, int]]:
    """(label, (hidden, top_k_index, top_k_weights), H, I, E)."""
    wide = torch.float64 if draw.dtype == torch.float64 else torch.float32
    for tokens, size, intermediate, experts, top_k in SHAPES:
        index, weights = _routing(draw, tokens, experts, top_k)
        label = f"T={tokens} H={size} I={intermediate} E={experts} k={top_k}"
        for dtype in dict.fromkeys((wide, draw.dtype)):
            routed = draw.normal(tokens, size), index, weights.to(dtype)
            yield f"{label} weights in {dtype}", routed, size, intermediate, experts
    index, weights = _routing(draw, 4, 6, 2)
    weights = weights.to(wide)
    yield "zeros, 1e4 and 1e-4", (draw.extreme_rows(48), index, weights), 48, 32, 6
    yield "rows apart", (spread(draw.normal(4, 48)), index, weights), 48, 32, 6
    yield "one expert takes all", (draw.normal(4, 48), torch.full_like(index[:, :1], 5), weights[:, :1]), 48, 32, 6
    yield "experts elsewhere", (draw.normal(4, 48), torch.where(index > 2, 6, index), weights), 48, 32, 6


def _inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 81)
    for label, routed, size, intermediate, experts in _activations(draw):
        gate_up = draw.normal(experts, 2 * intermediate, size, scale=size**-0.5)
        down = draw.normal(experts, size, intermediate, scale=intermediate**-0.5)
        yield Case(label, (*routed, gate_up, down))
        if dtype == torch.float32:
            yield Case(f"{label}, bfloat16 experts", (*routed, gate_up.to(torch.bfloat16), down.to(torch.bfloat16)))


def _int8_inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 82)
    for label, routed, size, intermediate, experts in _activations(draw):
        gate_up, gate_up_scale = draw.int8_weight(experts, 2 * intermediate, size)
        down, down_scale = draw.int8_weight(experts, size, intermediate)
        yield Case(label, (*routed, gate_up, gate_up_scale, down, down_scale))


STANDARD = "(Tensor hidden, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up, Tensor down) -> Tensor"
INT8 = (
    "(Tensor hidden, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up, Tensor gate_up_scale, Tensor down, "
    "Tensor down_scale) -> Tensor"
)

OPS = (
    Op("experts", "standard", STANDARD, experts_standard, _fake, _inputs, TOLERANCE, _cost),
    Op("experts", "w8a16", INT8, experts_w8a16, _fake, _int8_inputs, TOLERANCE, _cost),
    Op("experts", "w8a8", INT8, experts_w8a8, _fake, _int8_inputs, INT8_TOLERANCE, _cost, exact=experts_w8a8_exact),
)
