"""A run of a model under the emulator, watched: every vendor call and the module that made it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from porter.kernels.ascend.catalogue.vendor_op import Call
from porter.kernels.ascend.emulator.stand_in import Emulator

SHARED = ("atten_mask", "pse_shift", "pse", "cos", "sin", "r1", "r2", "rope_cos", "rope_sin", "block_table")
"""Arguments that layers and steps share, and that no one may change between their calls."""
LARGEST = 1 << 24
"""Elements of a shared tensor that are compared; larger ones would take longer than they tell."""


@dataclass(frozen=True)
class TracedCall:
    """One vendor call: the innermost `module` that was running, its name, and what the call returned."""

    name: str
    module: nn.Module
    call: Call
    result: Any

    @property
    def op(self) -> str:
        """The operator's name."""
        return self.call.op.name


@dataclass(frozen=True)
class Passed:
    """What one call of a module took and gave: whether all numbers were finite, and which rows of the first output
    [rows, features] were not."""

    name: str
    finite_before: bool
    bad_rows: Tensor


@dataclass
class Trace:
    """All that was seen. `changed`: shared arguments and buffers that differ from what an earlier call saw."""

    calls: list[TracedCall] = field(default_factory=list)
    passed: list[Passed] = field(default_factory=list)
    changed: list[tuple[str, str]] = field(default_factory=list)
    _stack: list[tuple[str, nn.Module]] = field(default_factory=list)
    _shared: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def take(self, call: Call, result: Any) -> None:
        """An observer of the emulator."""
        name, module = self._stack[-1] if self._stack else ("", nn.Module())
        self.calls.append(TracedCall(name, module, call, result))
        for argument in SHARED:
            value = call.arguments.get(argument)
            if isinstance(value, Tensor) and value.numel() <= LARGEST:
                self._compare(name, f"{argument} of {call.op.name}", value)

    def _compare(self, name: str, what: str, tensor: Tensor) -> None:
        # Holding the tensor keeps its memory from being given to another one.
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        held = self._shared.setdefault(key, (tensor, tensor.detach().clone()))
        if not torch.equal(held[1], tensor) and (name, what) not in self.changed:
            self.changed.append((name, what))

    @property
    def running(self) -> str:
        """The innermost module that was running when the run ended before its time; "" where it did not."""
        return self._stack[-1][0] if self._stack else ""

    def entered(self, name: str, module: nn.Module) -> None:
        """A module begins."""
        self._stack.append((name, module))

    def left(self, name: str, given: Any, output: Any) -> None:
        """A module is done."""
        self._stack.pop()
        first = next(_tensors(output), None)
        if first is None or not first.is_floating_point() or first.dim() < 2:
            return
        bad = ~torch.isfinite(first.reshape(-1, first.shape[-1])).all(-1)
        self.passed.append(Passed(name, all(bool(torch.isfinite(t).all()) for t in _tensors(given)), bad))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


@contextmanager
def traced(model: nn.Module, emulator: Emulator) -> Iterator[Trace]:
    """Inside, every call that `model` makes under `emulator` is noted; its own buffers are compared at the end."""
    trace = Trace()
    before = {name: b.detach().clone() for name, b in model.named_buffers() if b.numel() <= LARGEST}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            enter = module.register_forward_pre_hook(_entering(trace, name))
            leave = module.register_forward_hook(_leaving(trace, name), with_kwargs=True)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        emulator.observers.append(trace.take)
        stack.callback(emulator.observers.remove, trace.take)
        yield trace
    for name, buffer in model.named_buffers():
        if name in before and "cache" not in name and not _equal(before[name], buffer):
            trace.changed.append((name.rpartition(".")[0], f"buffer {name.rpartition('.')[2]}"))


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _entering(trace: Trace, name: str) -> Callable[..., None]:
    return lambda module, args: trace.entered(name, module)


def _leaving(trace: Trace, name: str) -> Callable[..., None]:
    return lambda module, args, kwargs, output: trace.left(name, (args, kwargs), output)
