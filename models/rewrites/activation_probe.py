"""Whether a gated activation is clamped, judged by values so large that a limit shows: ordinary inputs reach none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from porter.models.proof import CANNOT_RUN

LARGE = 100.0
"""Standard deviation of the inputs: activations of hundreds, past any limit that a model has been released with."""
CLOSE = 1e-4

Gated = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def limits(module: nn.Module) -> list[str]:
    """Attributes that may be the limit of a clamp: positive numbers of at least a half."""
    return [n for n, v in vars(module).items() if type(v) in (float, int) and 0.5 <= v < 1e4]


def plain(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return torch.nn.functional.silu(gate) * up


def clamped(limit: float) -> Gated:
    """silu(min(gate, limit)) * clamp(up, -limit, limit)."""
    return lambda gate, up: plain(gate.clamp(max=limit), up.clamp(-limit, limit))


def form_of(
    module: nn.Module, output: Callable[[], torch.Tensor], expected: Callable[[Gated], torch.Tensor]
) -> str | None:
    """What `module` does to its gated activation: "" for plain, the name of the attribute that limits it, or None.

    `output` is what the module gives for large inputs, `expected` what it would give with a form of the activation.
    A module that cannot be run here is taken for plain, as its proof will tell.
    """
    with torch.no_grad():
        try:
            wanted = output()
        except CANNOT_RUN:
            return ""
        forms = {"": plain} | {name: clamped(float(getattr(module, name))) for name in limits(module)}
        return next((name for name, form in forms.items() if _close(expected(form), wanted)), None)


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.shape == theirs.shape and bool((ours - theirs).norm() <= CLOSE * theirs.norm())


def large(module: nn.Module, *shape: int) -> torch.Tensor:
    """Large values, the same every time, in the dtype and on the device of `module`'s weights."""
    like = next(module.parameters())
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return (LARGE * values).to(like)
