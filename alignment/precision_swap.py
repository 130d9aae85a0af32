"""Running a module in another precision without copying it: its tensors are swapped in place and put back.

In place, because a candidate may be patched by closures over its own objects: a copy would not run the patched code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from porter.alignment.model_call import widened
from porter.alignment.streaming import stream_of
from porter.kernels.dispatch import using_reference
from porter.precision import float64_mode

EXPERTS = "_experts_implementation_internal"
"""Where a transformers config keeps the name of the experts' implementation."""

Convert = Callable[[Tensor], Tensor]


def to_float64(tensor: Tensor) -> Tensor:
    """Floating-point tensors in float64, others as they are. Raises CannotRun where the device has none."""
    return widened(tensor.detach()) if tensor.is_floating_point() else tensor


@contextmanager
def swapped(module: nn.Module, convert: Convert, leave: Collection[nn.Module] = ()) -> Iterator[None]:
    """Every parameter, buffer and tensor attribute of the tree replaced by `convert` of it while the context lasts.

    Modules in `leave`, and what is below them, keep theirs. A tensor used twice is converted once. Of a whole model
    that is streamed nothing is in memory at first: what is read while the context lasts is converted as it comes.
    """
    stream = stream_of(module)
    if stream is not None and stream.model is module:
        stream.release()
    undo: list[tuple[dict[str, Any], str, Tensor]] = []
    converted: dict[int, Tensor] = {}
    try:
        for owner in _tree(module, set(map(id, leave))):
            tables: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers, owner.__dict__)
            for table in tables:
                for name, tensor in list(table.items()):
                    if not isinstance(tensor, Tensor):
                        continue
                    value = converted.setdefault(id(tensor), convert(tensor))
                    if value is not tensor:
                        undo.append((table, name, tensor))
                        is_parameter = isinstance(tensor, nn.Parameter)
                        table[name] = nn.Parameter(value, requires_grad=False) if is_parameter else value
        yield
    finally:
        for table, name, tensor in reversed(undo):
            table[name] = tensor


@contextmanager
def exact(module: nn.Module, leave: Collection[nn.Module] = ()) -> Iterator[None]:
    """The module in float64, its Ops on their references, hard-coded float32 widened, experts one by one.

    transformers' grouped products of experts take no float64.
    """
    with ExitStack() as stack:
        stack.enter_context(swapped(module, to_float64, leave))
        stack.enter_context(_experts_one_by_one(module))
        stack.enter_context(using_reference(module))
        stack.enter_context(float64_mode())
        yield


@contextmanager
def _experts_one_by_one(module: nn.Module) -> Iterator[None]:
    configs = {id(each.config): each.config for each in module.modules() if hasattr(each, "config")}
    before = [
        (config, config.__dict__[EXPERTS]) for config in configs.values() if EXPERTS in getattr(config, "__dict__", {})
    ]
    try:
        for config, _ in before:
            config.__dict__[EXPERTS] = "eager"
        yield
    finally:
        for config, implementation in before:
            config.__dict__[EXPERTS] = implementation


def _tree(module: nn.Module, leave: set[int]) -> Iterator[nn.Module]:
    if id(module) in leave:
        return
    yield module
    for child in module.children():
        yield from _tree(child, leave)
