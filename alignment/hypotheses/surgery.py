"""Injecting a known bug into a source module without touching the original, its class or transformers.

A copy shares every tensor with the original and owns only its module objects, so a trial on a layer of a large model
costs no memory. Bugs are planted by replacing parameters and attributes of the copy, or its `forward`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from porter.models.cache_argument import CACHE_NAMES

INTERFACES = "ALL_ATTENTION_FUNCTIONS"
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def shallow_copy(module: nn.Module, memo: dict[int, nn.Module] | None = None) -> nn.Module:
    """A copy of the module tree that shares all parameters and buffers; modules used twice stay one module."""
    memo = {} if memo is None else memo
    if id(module) in memo:
        return memo[id(module)]
    clone = copy.copy(module)
    memo[id(module)] = clone
    own = clone.__dict__
    own["_parameters"] = dict(module._parameters)
    own["_buffers"] = dict(module._buffers)
    own["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
    for name in HOOKS:
        own[name] = OrderedDict(getattr(module, name))
    own["_modules"] = {
        name: None if child is None else shallow_copy(child, memo) for name, child in module._modules.items()
    }
    bound = own.get("forward")
    if isinstance(bound, types.MethodType) and bound.__self__ is module:
        own["forward"] = types.MethodType(bound.__func__, clone)
    return clone


def set_parameter(module: nn.Module, name: str, value: torch.Tensor | None) -> None:
    """Replace the parameter or buffer `name` (dotted) of `module`; None removes a bias."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._buffers:
        owner._buffers[leaf] = value
    else:
        owner._parameters[leaf] = None if value is None else nn.Parameter(value.detach(), requires_grad=False)


def forward_function(module: nn.Module) -> Any:
    """The undecorated `forward` of the module's class: a plain function, or whatever else the class has there."""
    return inspect.unwrap(type(module).forward)


def names_global(module: nn.Module, name: str) -> bool:
    """Whether the module's `forward` calls the module-level function `name`."""
    function = forward_function(module)
    return isinstance(function, types.FunctionType) and name in function.__code__.co_names


def rebind_globals(module: nn.Module, replacements: Mapping[str, Any]) -> None:
    """Give this one instance a `forward` that sees `replacements` in place of its module's globals of those names."""
    function = forward_function(module)
    twin = types.FunctionType(
        function.__code__,
        {**function.__globals__, **replacements},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    rebind_forward(module, twin)


def rebind_forward(module: nn.Module, function: Callable[..., Any]) -> None:
    """Make `function(self, ...)` the instance's forward, accepting the cache under the name that callers use."""
    accepted = inspect.signature(function).parameters

    @functools.wraps(function)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for given, wanted in itertools.permutations(CACHE_NAMES):
            if given in kwargs and given not in accepted and wanted in accepted:
                kwargs[wanted] = kwargs.pop(given)
        return function(self, *args, **kwargs)

    module.__dict__["forward"] = types.MethodType(forward, module)


class WrappedInterfaces:
    """transformers' table of attention functions, each wrapped: what one instance sees as ALL_ATTENTION_FUNCTIONS."""

    def __init__(self, original: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.original = original
        self.wrap = wrap

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        """The function that the original table has for `name`, wrapped."""
        return self.wrap(self.original.get_interface(name, default))


def wrap_attention(module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap one instance's attention function: (module, query, key, value, ...) -> (output [B, S, H, D], weights)."""
    original = forward_function(module).__globals__[INTERFACES]
    rebind_globals(module, {INTERFACES: WrappedInterfaces(original, wrap)})


def map_output(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Pass the module's output, or the first tensor of its output tuple, through `change`."""

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    module.register_forward_hook(hook)
