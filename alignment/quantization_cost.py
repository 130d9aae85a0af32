"""What quantizing activations to int8 must cost, so that it is not taken for a fault."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from porter.activation_range import HIGHEST, LOWEST, Range
from porter.alignment.calls import Call, mapped
from porter.alignment.observation import errors, tensors
from porter.alignment.quantized_weight import INT8_LEVELS
from porter.kernels.dispatch import op_calls
from porter.quantization import STATIC

if TYPE_CHECKING:
    from porter.alignment.lanes import Side
    from porter.alignment.module_result import ModuleResult
    from porter.alignment.replay import Replayer

QUANTIZING = ("w8a8", "clamped_w8a8", "w4a8", STATIC)
"""Variants of Ops that quantize their activations."""
STATIC_SLACK = 4.0
"""How much more than the best scale for the very inputs a scale that was measured on other data may lose. The step is
proportional to the range, so it is the ratio of the two ranges, 2 bits of 8; inputs beyond the range lose more."""
# Codes on both sides of a tie: the port rounds activations that carry its own rounding.
EXPERT_SLACK = 1.5
# Where an expert's own arithmetic is unknown, what its second projection costs is guessed from the first.
UNKNOWN_SLACK = 3.0


def quantizes_activations(module: nn.Module) -> Literal["linear", "experts"] | None:
    """Which of the module's own Ops quantize their activations, if any."""
    own = {call.name for site, call in op_calls(module) if "." not in site and call.variant in QUANTIZING}
    return "linear" if "linear" in own else "experts" if "experts" in own else None


def rounded_per_token(tensor: Tensor) -> Tensor:
    """[..., K] rounded to 255 levels of absmax / 127 per row, ties to even, in float64, as the Op linear/w8a8 does."""
    exact = tensor.to(torch.float64)
    scale = exact.abs().amax(dim=-1, keepdim=True).clamp_min(1e-300) / INT8_LEVELS
    return (exact / scale).round() * scale


def rounded_activations(module: nn.Module, calls: Sequence[Call]) -> list[Call]:
    """The calls with their hidden states as the module's int8 product sees them."""
    found = [tensor for call in calls for _, tensor in tensors([call.args, call.kwargs], "")]
    rounded = _rounding(module, [tensor for tensor in found if tensor.is_floating_point()])

    def seen(tensor: Tensor) -> Tensor:
        return rounded(tensor) if tensor.is_floating_point() else tensor

    return [replace(call, args=mapped(call.args, seen), kwargs=mapped(call.kwargs, seen)) for call in calls]


def _rounding(module: nn.Module, inputs: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """How the module's int8 product rounds its activations.

    Of a scale that was measured beforehand as that does, saturation among it, where this loses no more of these
    `inputs` than STATIC_SLACK times what the best scale for them would; else as the best scale does, so that a scale
    that does not fit them shows as an error of the module.
    """
    scale, offset = getattr(module, "input_scale", None), getattr(module, "input_offset", None)
    if not isinstance(scale, Tensor) or not isinstance(offset, Tensor):
        return rounded_per_token

    def own(tensor: Tensor) -> Tensor:
        return rounded_static(tensor, scale, offset)

    if not any(tensor.numel() for tensor in inputs):
        return own
    low = min(float(tensor.min()) for tensor in inputs if tensor.numel())
    high = max(float(tensor.max()) for tensor in inputs if tensor.numel())
    best_scale, best_offset = Range(min(low, 0.0), max(high, 0.0)).parameters()

    def best(tensor: Tensor) -> Tensor:
        return rounded_static(tensor, best_scale, best_offset)

    return own if _lost(inputs, own) <= STATIC_SLACK * _lost(inputs, best) else best


def _lost(inputs: Sequence[Tensor], rounded: Callable[[Tensor], Tensor]) -> float:
    return math.sqrt(sum(float((rounded(t) - t.to(torch.float64)).square().sum()) for t in inputs))


def rounded_static(tensor: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """[..., K] at the levels of codes tensor / scale + offset within [-128, 127], in float64, as linear/w8a8_static."""
    step, shift = scale.detach().to(tensor.device, torch.float64), offset.detach().to(tensor.device, torch.float64)
    codes = (tensor.to(torch.float64) / step + shift).round().clamp(LOWEST, HIGHEST)
    return (codes - shift) * step


def activation_cost(module: nn.Module, replayer: Replayer, source: Side, result: ModuleResult) -> float:
    """The relative error that quantized activations may add to stacked experts; 0 for other modules."""
    if quantizes_activations(module) != "experts":
        return 0.0
    stacked = [getattr(source.module, name, None) for name in ("gate_up_proj", "down_proj")]
    known = all(isinstance(weight, Tensor) for weight in stacked) and hasattr(source.module, "act_fn")
    if known and all(len(call.args) == 3 for call in result.calls):
        costs = [_experts_cost(source.module, call) for call in result.calls]
        return EXPERT_SLACK * max(costs, default=0.0)
    calls = [replace(call, args=(_rounded_floats(call.args[0]), *call.args[1:])) for call in result.calls]
    quantized = replayer.run_exact(source, calls)
    found = [
        error
        for seen, oracle in zip(quantized, result.oracle, strict=True)
        for error in errors(seen.tensors, oracle.tensors).values()
    ]
    return UNKNOWN_SLACK * max(found, default=0.0)


def _experts_cost(experts: Any, call: Call) -> float:
    """What rounding the inputs of both projections per token costs the experts of one call, in float64.

    Experts hold gate_up_proj [E, 2I, H] and down_proj [E, H, I] (transformers' stacked experts); the call gives hidden
    states, indices and weights of each token's experts.
    """
    hidden, index, weights = (tensor.double() if tensor.is_floating_point() else tensor for tensor in call.args[:3])
    plain, quantized = torch.zeros_like(hidden), torch.zeros_like(hidden)
    # Expert numbers outside the stack belong to other devices and add nothing.
    for expert in (e for e in index.unique().tolist() if 0 <= e < len(experts.down_proj)):
        token, place = (index == expert).nonzero(as_tuple=True)
        gate_up, down = experts.gate_up_proj[expert].double(), experts.down_proj[expert].double()
        factor = weights[token, place, None]
        for total, seen in ((plain, lambda tensor: tensor), (quantized, rounded_per_token)):
            active = _gated(experts, seen(hidden[token]) @ gate_up.T)
            total.index_add_(0, token, factor * (seen(active) @ down.T))
    size = float(plain.norm())
    return float((quantized - plain).norm()) / size if size else 0.0


def _gated(experts: Any, gate_up: Tensor) -> Tensor:
    """The gated activation [T, I] of gate_up [T, 2I], by the experts' own method where they clamp it."""
    if hasattr(experts, "_apply_gate"):
        return experts._apply_gate(gate_up)  # type: ignore[no-any-return]
    gate, up = gate_up.chunk(2, dim=-1)
    return experts.act_fn(gate) * up  # type: ignore[no-any-return]


def round_first(candidate: nn.Module) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """A forward pre-hook for the source of `candidate`: the first positional tensor as the candidate's int8 product
    sees it, in its own dtype."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_rounding(candidate, args[:1])(args[0]).to(args[0].dtype), *args[1:]) if args else args

    return hook


def _rounded_floats(tensor: Tensor) -> Tensor:
    return rounded_per_token(tensor) if tensor.is_floating_point() else tensor
