"""A different activation function, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import activated
from porter.alignment.hypotheses.trial import Trial, TrialHypothesis


class Activation(nn.Module):
    """An elementwise function as a module, as transformers keeps them."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`function(x)`."""
        return self.function(x)


FUNCTIONS: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("silu", nn.functional.silu),
    ("gelu (exact)", nn.functional.gelu),
    ("gelu (tanh approximation)", lambda x: nn.functional.gelu(x, approximate="tanh")),
    ("gelu (x * sigmoid(1.702 x))", lambda x: x * torch.sigmoid(1.702 * x)),
    ("relu", torch.relu),
    ("relu squared", lambda x: torch.relu(x).square()),
    ("sigmoid", torch.sigmoid),
    ("tanh", torch.tanh),
    ("mish", nn.functional.mish),
    ("silu of the negated gate", lambda x: nn.functional.silu(-x)),
    ("no activation", lambda x: x),
)


def _replace(path: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        owner = module.get_submodule(path)
        owner.__dict__.pop("act_fn", None)
        owner._modules["act_fn"] = Activation(function)

    return change


def _own_name(part: nn.Module) -> str:
    own: Callable[[torch.Tensor], torch.Tensor] = part.act_fn  # type: ignore[assignment]
    points = torch.linspace(-4, 4, 33, dtype=torch.float64)
    with torch.no_grad():
        image = own(points)
        return next((name for name, f in FUNCTIONS if torch.allclose(image, f(points), atol=1e-7)), "another function")


def _trials(drift: Drift) -> Iterator[Trial]:
    for path, part in activated(drift.source_module):
        own = _own_name(part)
        for name, function in FUNCTIONS:
            if name != own:
                says = f"The activation is {name} where the source has {own}: use {own}"
                yield Trial("activation", says, _replace(path, function), part=path)


HYPOTHESIS = TrialHypothesis(("activation",), _trials)
