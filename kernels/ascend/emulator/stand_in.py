"""The emulator: the catalogue's operators under their real `npu::` names, on CPU tensors, and a module torch_npu that
calls them."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from porter.kernels.ascend.catalogue.table import catalogue
from porter.kernels.ascend.catalogue.vendor_op import A2, Call, VendorOp, VendorRefusal
from porter.kernels.ascend.dry_run import shape_only
from porter.kernels.ascend.emulator.formats import Formats
from porter.kernels.ascend.emulator.semantics import SEMANTICS
from porter.kernels.ascend.vendor import EMULATED

NAMESPACE = "npu"
EMULATOR = "porter_emulator"
"""Attribute of the module torch_npu: the Emulator itself."""
Observer = Callable[[Call, Any], None]


@dataclass
class Emulator:
    """The chip that is emulated; `observers` are told of every call and its result."""

    chip: str = A2
    formats: Formats = field(default_factory=Formats)
    observers: list[Observer] = field(default_factory=list)

    def run(self, op: VendorOp, positional: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The operator's result. Raises VendorRefusal for a call that the vendor does not document."""
        call = op.bind(self.chip, positional, keywords)
        op.check(call, values=True)
        self.formats.check(call)
        if op.name == "npu_format_cast":
            result = call["input"].clone(memory_format=torch.contiguous_format)
            self.formats.note(result, call["acl_format"])
        else:
            result = SEMANTICS[op.name](call)
        _check_outputs(op, result, op.outputs(_on_meta(call)))
        for observe in self.observers:
            observe(call, result)
        return result

    def kernel(self, op: VendorOp) -> Callable[..., Any]:
        """What a dispatcher calls for `op` on CPU tensors."""
        return lambda *positional, **keywords: self.run(op, positional, keywords)


@contextmanager
def emulated_npu(chip: str = A2) -> Iterator[Emulator]:
    """Inside, `import torch_npu` gives the emulator of `chip`, whose operators take CPU tensors.

    Raises RuntimeError where another torch_npu is loaded. Nothing of it is left afterwards.
    """
    if "torch_npu" in sys.modules:
        raise RuntimeError("torch_npu is loaded already; the emulator needs a process without it")
    emulator = Emulator(chip)
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for op in catalogue().values():
        library.define(op.name + op.schema)
        library.impl(op.name, emulator.kernel(op), "CPU")
        library.impl(op.name, _shapes(emulator, op), "Meta")
    sys.modules["torch_npu"] = _module(emulator)
    try:
        yield emulator
    finally:
        del sys.modules["torch_npu"]
        library._destroy()


def active_emulator() -> Emulator | None:
    """The emulator whose context this is; None outside."""
    return getattr(sys.modules.get("torch_npu"), EMULATOR, None)


def _shapes(emulator: Emulator, op: VendorOp) -> Callable[..., Any]:
    def shapes(*positional: Any, **keywords: Any) -> Any:
        call = op.bind(emulator.chip, positional, keywords)
        op.check(call)
        return op.outputs(call)

    return shapes


def _module(emulator: Emulator) -> ModuleType:
    """A module torch_npu: the operators, the formats of tensors, and the mark by which kernels know the emulator."""
    module = ModuleType("torch_npu", "Emulated by porter on the CPU.")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    for op in catalogue().values():
        setattr(module, op.name, _caller(emulator, op))
    vars(module)["get_npu_format"] = emulator.formats.of
    setattr(module, EMULATED, emulator.chip)
    setattr(module, EMULATOR, emulator)
    return module


def _caller(emulator: Emulator, op: VendorOp) -> Callable[..., Any]:
    def caller(*positional: Any, **keywords: Any) -> Any:
        if (forgotten := op.left_out(op.bind(emulator.chip, positional, keywords))) is not None:
            raise VendorRefusal(forgotten)
        return getattr(torch.ops.npu, op.name)(*positional, **keywords)

    caller.__name__ = op.name
    return caller


def _on_meta(call: Call) -> Call:
    def moved(value: Any) -> Any:
        return [moved(v) for v in value] if isinstance(value, (list, tuple)) else shape_only(value)

    return Call(call.op, call.chip, {name: moved(value) for name, value in call.arguments.items()}, call.given)


def _check_outputs(op: VendorOp, result: Any, expected: Any) -> None:
    """The catalogue's outputs and the emulator's must agree: kernels were accepted on the former."""
    got, wanted = _listed(result), _listed(expected)
    if [(t.shape, t.dtype) for t in got] != [(t.shape, t.dtype) for t in wanted]:
        shapes = [(str(t.dtype), list(t.shape)) for t in (*got, *wanted)]
        raise AssertionError(f"{op.name}: the emulator and the catalogue differ in the outputs: {shapes}")


def _listed(outputs: Any) -> list[torch.Tensor]:
    if outputs is None:
        return []
    return [outputs] if isinstance(outputs, torch.Tensor) else [t for t in outputs if isinstance(t, torch.Tensor)]
