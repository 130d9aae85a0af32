"""A different activation function, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import activated
from porter.alignment.hypotheses.surgery import rebind_forward
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


def _own_name(own: Callable[[torch.Tensor], torch.Tensor]) -> str:
    points = torch.linspace(-4, 4, 33, dtype=torch.float64)
    with torch.no_grad():
        image = own(points)
        return next((name for name, f in FUNCTIONS if torch.allclose(image, f(points), atol=1e-7)), "another function")


def _rebind(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], None]:
    return lambda module: rebind_forward(module, lambda self, x: function(x))


def is_activation(module: nn.Module) -> bool:
    """Whether the module is one of `FUNCTIONS`."""
    leaf = not module._parameters and not module._buffers and not module._modules
    return leaf and type(module).__module__.startswith(("torch.nn.modules.activation", "transformers.activations"))


def _trials(drift: Drift) -> Iterator[Trial]:
    source = drift.source_module
    found = [(path, _own_name(part.act_fn), part) for path, part in activated(source, drift.forced)]  # type: ignore[arg-type]
    if is_activation(source):
        found.append(("", _own_name(source), source))
    for path, own, part in found:
        for name, function in FUNCTIONS:
            if name != own:
                says = f"The activation is {name} where the source has {own}: use {own}"
                change = _rebind(function) if part is source and is_activation(source) else _replace(path, function)
                yield Trial("activation", says, change, part=path)


HYPOTHESIS = TrialHypothesis(("activation",), _trials)
