"""Rotary embedding computed from another theta, without its scaling, or at shifted positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from porter.alignment.drift import Drift, Inputs
from porter.alignment.hypotheses.trial import Outcome, Trial, TrialHypothesis, cause, distance, solve
from porter.alignment.report import Cause

THETAS = (1e3, 1e4, 1e5, 5e5, 1e6, 5e6, 8e6, 1e7, 1e8)
LINEAR = (2.0, 4.0, 8.0, 16.0, 32.0, 0.5)
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
    for times in LINEAR if kind == "default" else ():
        says = f"Rotary frequencies are divided by {times:g} (linear scaling) where the source has no scaling"
        yield Trial("rope-scaling", says, _frequencies(partial(torch.mul, torch.tensor(1.0 / times))))
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


@dataclass(frozen=True)
class OtherPositions:
    """Whole positions other than the source's, read off the tables that the candidate put out."""

    kinds: tuple[str, ...] = ("position-offset",)

    def applies(self, drift: Drift) -> bool:
        """Whether the module is a rotary embedding of one position per token."""
        return is_rotary(drift.source_module) and all(p is not None and p.dim() == 2 for p in _positions(drift))

    def explain(self, drift: Drift) -> Cause | None:
        """The position of the source whose row is nearest to each of the candidate's."""
        given = [p for p in _positions(drift) if p is not None]
        count = min(MOST_POSITIONS, 2 * int(max(p.max() for p in given)) + MORE_POSITIONS)
        table = drift.run(drift.source_module, _at(iter([torch.arange(count)[None]] * len(given))))[0]
        rows = _rows(table)
        found = []
        for seen, positions in zip(drift.candidate_output, given, strict=False):
            mine = _rows(seen)
            if mine.shape[0] != positions.numel() or mine.shape[1] != rows.shape[1]:
                return None
            found.append(torch.cdist(mine, rows).argmin(-1).view(positions.shape).to(positions))
        before, after = (torch.cat([p.flatten() for p in each]).tolist() for each in (given, found))
        pairs = list(dict.fromkeys((a, b) for a, b in zip(before, after, strict=True) if a != b))
        words = ", ".join(f"{b} where the source has {a}" for a, b in pairs[:4]) + (", ..." if len(pairs) > 4 else "")
        says = f"Positions are others than the source's: {words}"
        return cause(drift, Outcome(Trial("position-offset", says), distance(drift, inputs=_at(iter(found)))))


MOST_POSITIONS, MORE_POSITIONS = 8192, 64


def _positions(drift: Drift) -> list[torch.Tensor | None]:
    """The position ids of every recorded call."""
    given: list[torch.Tensor | None] = []

    def spy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        position_ids = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        given.append(position_ids if isinstance(position_ids, torch.Tensor) else None)
        return args, kwargs

    drift.run(drift.source_module, spy)
    return given


def _at(positions: Iterator[torch.Tensor]) -> Callable[[tuple[Any, ...], dict[str, Any]], Inputs]:
    """Every call is given the next of `positions`."""

    def change(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": next(positions)}
        return (args[0], next(positions), *args[2:]), kwargs

    return change


def _rows(seen: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """All tables of a call side by side: [tokens, features]. Complex ones are observed as [B, S, R / 2, 2]."""
    tables = [t for label, t in seen.items() if label.startswith("output")]
    tokens = [t.reshape(-1, t.shape[-1]) if t.dim() < 4 else t.flatten(0, 1).flatten(1) for t in tables]
    return torch.cat(tokens, dim=-1)


@dataclass(frozen=True)
class OtherFrequencies:
    """Frequencies other than the source's, whatever they come from, read off neighbouring tokens."""

    kinds: tuple[str, ...] = ("rope-scaling",)

    def applies(self, drift: Drift) -> bool:
        """Whether the module is a rotary embedding that puts out cosines and sines [B, S, R] of several tokens."""
        first = drift.candidate_output[0] if drift.candidate_output else {}
        tables = [first.get(label) for label in ("output", "output.1")]
        several = all(t is not None and t.dim() == 3 and t.shape[1] > 2 for t in tables)
        return is_rotary(drift.source_module) and several

    def explain(self, drift: Drift) -> Cause | None:
        """The frequencies that turn each token into the next."""
        rotary: Any = drift.source_module
        own = rotary.inv_freq.to(torch.float64)
        cos, sin = (drift.candidate_output[0][label][-1, -3:, : len(own)] for label in ("output", "output.1"))
        turned = torch.atan2(sin[2] * cos[1] - cos[2] * sin[1], cos[2] * cos[1] + sin[2] * sin[1])
        scaling = float((cos.square() + sin.square()).sqrt().mean())
        ratio = turned / own
        low, high = float(ratio.min()), float(ratio.max())
        how = f"all {low:.6g} times" if abs(high - low) < 1e-4 * high else f"from {low:.4g} to {high:.4g} times"
        says = f"Rotary frequencies are {how} the source's: its scaling is another ({rotary.config.rope_parameters})"
        after = distance(drift, _frequencies(lambda f: turned.to(f), scaling))
        return cause(drift, Outcome(Trial("rope-scaling", says, resolves=FREQUENCY), after))


FREQUENCY = 1e-4
"""What frequencies read off float32 tables are good to."""

OTHER_POSITIONS = OtherPositions()
OTHER_FREQUENCIES = OtherFrequencies()
THETA = RopeTheta()
SCALING = TrialHypothesis(("rope-scaling",), _scaling_trials)
POSITION = TrialHypothesis(("position-offset",), _position_trials)
