"""Rotary embedding computed from another theta, without its scaling, or at shifted positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from porter.alignment.drift import Drift, Inputs
from porter.alignment.hypotheses.trial import Outcome, Trial, TrialHypothesis, cause, distance, solve
from porter.alignment.report import Cause

THETAS = (1e3, 1e4, 1e5, 5e5, 1e6, 5e6, 8e6, 1e7, 1e8)
SHIFTS = (-2, -1, 1, 2)


def is_rotary(module: nn.Module) -> bool:
    """Whether the module turns positions into cosines and sines."""
    return "inv_freq" in module._buffers and hasattr(module, "attention_scaling")


def plain_frequencies(count: int, theta: float, like: torch.Tensor) -> torch.Tensor:
    """theta ** (-2i / R) for i < count = R / 2, unscaled."""
    return theta ** (-torch.arange(count, dtype=torch.float64, device=like.device) / count)


def _frequencies(
    change: Callable[[torch.Tensor], torch.Tensor], scaling: float | None = None
) -> Callable[[nn.Module], None]:
    def plant(module: nn.Module) -> None:
        module._buffers["inv_freq"] = change(module.inv_freq)  # type: ignore[arg-type]
        if scaling is not None:
            module.attention_scaling = scaling  # type: ignore[assignment]

    return plant


@dataclass(frozen=True)
class RopeTheta:
    """Another base, with the source's scaling of the frequencies kept."""

    kinds: tuple[str, ...] = ("rope-theta",)

    def applies(self, drift: Drift) -> bool:
        """Whether the module is a rotary embedding."""
        return is_rotary(drift.source_module)

    def explain(self, drift: Drift) -> Cause | None:
        """The theta that comes closest: a common one, or else the one that fits."""
        rotary: Any = drift.source_module
        own = float((rotary.config.rope_parameters or {}).get("rope_theta", 1e4))

        def distance_at(theta: float) -> float:
            return distance(drift, _frequencies(lambda f: f * _ratio(f, theta, own)))

        common = {theta: distance_at(theta) for theta in THETAS if theta != own}
        theta = min(common, key=common.__getitem__)
        after = common[theta]
        if after > drift.floor:
            theta, after = solve(distance_at, THETAS)
        says = f"Rotary frequencies come from theta {theta:.6g} where the source has {own:.6g}: set rope_theta"
        return cause(drift, Outcome(Trial("rope-theta", says), after))


def _ratio(like: torch.Tensor, theta: float, own: float) -> torch.Tensor:
    return plain_frequencies(like.shape[0], theta, like) / plain_frequencies(like.shape[0], own, like)


def _scaling_trials(drift: Drift) -> Iterator[Trial]:
    if not is_rotary(drift.source_module):
        return
    rotary: Any = drift.source_module
    rope = rotary.config.rope_parameters or {}
    kind, factor = str(rope.get("rope_type", "default")), float(rope.get("factor") or 1.0)
    theta, own = float(rope.get("rope_theta", 1e4)), float(rotary.attention_scaling)

    def plain(f: torch.Tensor) -> torch.Tensor:
        return plain_frequencies(f.shape[0], theta, f)

    if kind != "default":
        says = f"The {kind} scaling of the rotary frequencies is left out: apply it (factor {factor:g})"
        yield Trial("rope-scaling", says, _frequencies(plain, 1.0))
        yield Trial("rope-scaling", f"{says}; the factor on cos and sin is there", _frequencies(plain))
        says = f"Rotary frequencies are divided by {factor:g} (linear scaling) where the source uses {kind}"
        yield Trial("rope-scaling", says, _frequencies(lambda f: plain(f) / factor))
    if own != 1.0:
        says = f"{kind}'s factor {own:.5g} on cos and sin is left out: multiply both by it"
        yield Trial("rope-scaling", says, _frequencies(lambda f: f, 1.0))
    says = "Rotary frequencies use i / R in the exponent where the source uses 2i / R: the rotary width is doubled"
    yield Trial("rope-scaling", says, _frequencies(lambda f: f.sqrt()))


def _shift(amount: int, only_decode: bool) -> Callable[[tuple[Any, ...], dict[str, Any]], Inputs]:
    def change(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        if only_decode and positions.shape[-1] > 1:
            return args, kwargs
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": positions + amount}
        return (args[0], positions + amount, *args[2:]), kwargs

    return change


def _position_trials(drift: Drift) -> Iterator[Trial]:
    if is_rotary(drift.source_module):
        for amount in SHIFTS:
            says = f"Positions are {amount:+d} from the source's: count them from the same origin"
            yield Trial("position-offset", says, inputs=_shift(amount, only_decode=False))
            says = f"Decode positions are {amount:+d} from the source's: the prefill's length is counted differently"
            yield Trial("position-offset", says, inputs=_shift(amount, only_decode=True))


THETA = RopeTheta()
SCALING = TrialHypothesis(("rope-scaling",), _scaling_trials)
POSITION = TrialHypothesis(("position-offset",), _position_trials)
