"""Where a fault is planted: a layer of a candidate, ported or upstream's, behind the same few verbs.

Nothing here knows what an aligner looks for. A fault replaces a class's forward, an Op of a port, a function that
upstream's forward calls, or values of a weight, as a bad port would.
"""

from __future__ import annotations

import inspect
import random
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.drift.families import Family

Function = Callable[..., Any]


class WrongOp:
    """Stands where a port holds an Op: calls `function(original, *arguments)`."""

    def __init__(self, original: Any, function: Function) -> None:
        self.original, self.function = original, function

    def __call__(self, *arguments: Any) -> Any:
        return self.function(self.original, *arguments)


@dataclass
class Site:
    """One layer of a candidate; `stored` holds (codes, scale, zero) of weights from a quantized checkpoint."""

    model: Any
    family: Family
    layer: int
    random: random.Random
    stored: dict[str, tuple[Tensor, ...]]

    def path(self, name: str) -> str:
        """The module's name in the model: names of a layer's parts are relative to the layer."""
        absolute = name == "model" or name.startswith(("model.", "lm_head"))
        return name if absolute else f"model.layers.{self.layer}.{name}".rstrip(".")

    def module(self, name: str) -> Any:
        """A module of the layer, or by its full name."""
        return self.model.get_submodule(self.path(name))

    def rows(self, name: str, parameter: str = "weight") -> tuple[str, Tensor]:
        """(name of the module that holds it, values) of an upstream linear's parameter, a view where it is fused."""
        parent, _, own = name.rpartition(".")
        for fused, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
            holder = self.module(parent)
            if own in parts and hasattr(holder, fused):
                values = getattr(getattr(holder, fused), parameter).data
                sizes = holder.qkv_sizes if fused == "qkv_proj" else [values.shape[0] // 2] * 2
                start = sum(sizes[: parts.index(own)])
                return self.path(f"{parent}.{fused}"), values[start : start + sizes[parts.index(own)]]
        return self.path(name), getattr(self.module(name), parameter).data

    def change(self, name: str, change: Callable[[Tensor], Tensor], parameter: str = "weight") -> str:
        """Write `change` of a parameter's values over them; the holding module's name."""
        path, values = self.rows(name, parameter)
        values.copy_(change(values.clone()))
        return path

    def forward(self, name: str, function: Function) -> str:
        """Give a module another class, whose forward is `function(self, original_forward, ...)`."""
        module = self.module(name)
        kind = type(module)
        original = kind.forward

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return function(self, types.MethodType(original, self), *args, **kwargs)

        module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
        return self.path(name)

    def global_function(self, name: str, **functions: Function) -> str:
        """Let a module's forward see other functions than its file defines."""
        module = self.module(name)
        kind = type(module)
        plain: Any = inspect.unwrap(kind.forward)
        unknown = [each for each in functions if each not in plain.__globals__]
        assert not unknown, f"{kind.__name__}.forward knows no {unknown}"
        forward = types.FunctionType(
            plain.__code__, {**plain.__globals__, **functions}, plain.__name__, plain.__defaults__, plain.__closure__
        )
        forward.__kwdefaults__ = plain.__kwdefaults__
        module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
        return self.path(name)

    def op(self, name: str, attribute: str, function: Function) -> str:
        """Replace an Op of a ported module by `function(original, *arguments)`."""
        module = self.module(name)
        setattr(module, attribute, WrongOp(getattr(module, attribute), function))
        return self.path(name)

    def kernel(self, name: str, attribute: str, function: Function) -> str:
        """Break the chip's kernel of an Op and leave its reference right: `function(reference, *arguments)`."""
        call = getattr(self.module(name), attribute)
        reference = call.op.reference
        call._chain = (("cpu", lambda *arguments: None, lambda *arguments: function(reference, *arguments)),)
        return self.path(name)

    def output(self, name: str, change: Callable[[Tensor], Tensor]) -> str:
        """Change the first tensor that a module returns."""

        def function(self: Any, original: Function, *args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

        return self.forward(name, function)

    def draw(self, *shape: int) -> Tensor:
        """Normal values that depend on the case's seed alone."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(self.random.randrange(1 << 30)))

    def order(self, count: int) -> Tensor:
        """A permutation that moves something."""
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.random.randrange(1 << 30)))
        return order if bool((order != torch.arange(count)).any()) else order.roll(1)

