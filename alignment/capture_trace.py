"""What passed every module's boundary during one run, from a golden or from a live model, as digests."""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from porter.alignment.observation import is_mask, tensors
from porter.alignment.pairing import module_names
from porter.golden.format import host_bytes
from porter.golden.node import Node, tensor_nodes
from porter.golden.store import Golden

SAMPLES = 8
MASK_BELOW = -1e30


@dataclass(frozen=True)
class Passed:
    """One floating-point tensor at a boundary. `digest` is equal for equal tensors of one trace; `id` names it in a
    golden."""

    digest: str
    shape: tuple[int, ...]
    id: str | None = None


@dataclass(frozen=True)
class Passage:
    """One call of one module: the floating-point tensors that went in and came out, masks left out."""

    module: str
    step: int
    call: int
    inputs: tuple[Passed, ...]
    outputs: tuple[Passed, ...]


def recorded_passages(golden: Golden) -> list[Passage]:
    """The calls of a golden in the order in which they returned; reads no tensor."""
    return [
        Passage(r.module, r.step, r.call, tuple(_recorded(r.inputs)), tuple(_recorded(r.outputs)))
        for r in golden.records
    ]


def _recorded(node: Node) -> Iterator[Passed]:
    for found in tensor_nodes(node):
        lowest = found["stats"].get("min")
        mask = len(found["shape"]) == 4 and (
            bool(found["stats"].get("inf")) or (lowest is not None and lowest < MASK_BELOW)
        )
        if found["dtype"].startswith(("float", "bfloat")) and not mask:
            yield Passed(found["digest"], tuple(found["shape"]), found["tensor"])


@dataclass
class LiveTrace:
    """What hooks saw of one forward of a live model.

    `passages`: of the modules that were asked for, with digests. `changed`: (module that returned a tensor, module at
    whose boundary it was found changed in place since). `shared`: (module, earlier module) whose outputs lie in the
    same memory though neither passed the other's tensor on. `called`: names of all modules that were called.
    """

    passages: list[Passage] = field(default_factory=list)
    changed: list[tuple[str, str]] = field(default_factory=list)
    shared: list[tuple[str, str]] = field(default_factory=list)
    called: set[str] = field(default_factory=set)


@contextmanager
def watching(model: nn.Module, digested: Callable[[str], bool]) -> Iterator[LiveTrace]:
    """Hooks on every module for as long as the block runs; `digested` chooses the modules whose passages are kept."""
    trace = LiveTrace()
    watch = _Watch(trace, digested)
    handles = []
    try:
        for name in module_names(model):
            module = model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(watch.before(name), with_kwargs=True))
            handles.append(module.register_forward_hook(watch.after(name)))
        yield trace
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class _Returned:
    module: str
    tensor: weakref.ref[Tensor]
    version: int
    sample: list[Any]


@dataclass
class _Watch:
    trace: LiveTrace
    digested: Callable[[str], bool]
    _open: list[tuple[str, tuple[Passed, ...]]] = field(default_factory=list)
    _calls: Counter[str] = field(default_factory=Counter)
    _returned: dict[int, _Returned] = field(default_factory=dict)
    _memory: dict[int, tuple[str, weakref.ref[Tensor]]] = field(default_factory=dict)

    def before(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        """The hook on what goes into the module `name`."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = list(_floating((args, kwargs)))
            self._look_for_changes(given, name)
            self._open.append((name, self._passed(name, given)))

        return hook

    def after(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        """The hook on what comes out of it."""

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            found = list(_floating(output))
            while self._open[-1][0] != name:
                self._open.pop()
            inputs = self._open.pop()[1]
            self._remember(name, found)
            self.trace.called.add(name)
            if self.digested(name):
                outputs = self._passed(name, found)
                self.trace.passages.append(Passage(name, 0, self._calls[name], inputs, outputs))
            self._calls[name] += 1

        return hook

    def _passed(self, name: str, found: list[Tensor]) -> tuple[Passed, ...]:
        return tuple(Passed(_digest(t), tuple(t.shape)) for t in found) if self.digested(name) else ()

    def _remember(self, name: str, found: list[Tensor]) -> None:
        for tensor in found:
            known = self._returned.get(id(tensor))
            if known is not None and known.tensor() is tensor:
                continue
            self._note_shared(name, tensor)
            if not tensor.is_inference():
                reference = weakref.ref(tensor)
                self._returned[id(tensor)] = _Returned(name, reference, tensor._version, _sample(tensor))

    def _note_shared(self, name: str, tensor: Tensor) -> None:
        place = tensor.data_ptr()
        earlier = self._memory.get(place)
        if earlier is not None:
            before = earlier[1]()
            # A view of a tensor that is still held is one value under two names; memory that was freed is free to use.
            if before is not None and before is not tensor and before._base is not tensor and tensor._base is None:
                self.trace.shared.append((name, earlier[0]))
        self._memory[place] = (name, weakref.ref(tensor))

    def _look_for_changes(self, given: list[Tensor], name: str) -> None:
        for tensor in given:
            known = self._returned.get(id(tensor))
            if known is None or known.tensor() is not tensor:
                continue
            if known.version != tensor._version or known.sample != _sample(tensor):
                self.trace.changed.append((known.module, name))
                self._returned[id(tensor)] = _Returned(name, known.tensor, tensor._version, _sample(tensor))


def _floating(value: Any) -> Iterator[Tensor]:
    for _, tensor in tensors(value, ""):
        if tensor.is_floating_point() and tensor.numel() and not is_mask(tensor):
            yield tensor


def _sample(tensor: Tensor) -> list[Any]:
    flat = tensor.detach().flatten() if tensor.is_contiguous() else tensor.detach()[(0,) * (tensor.dim() - 1)]
    count = min(SAMPLES, flat.numel())
    sample: list[Any] = flat[:: max(1, flat.numel() // count)][:count].tolist()
    # NaN is unlike itself, which is no change.
    return [repr(value) for value in sample]


def _digest(tensor: Tensor) -> str:
    content = host_bytes(tensor.detach().cpu().contiguous())
    return f"{tensor.dtype}:" + hashlib.blake2b(content, digest_size=16).hexdigest()


def same(one: Any, other: Any) -> bool:
    """Whether two outputs hold bit-equal floating-point tensors; NaN equals NaN in the same place."""
    first, second = list(_floating(one)), list(_floating(other))
    return len(first) == len(second) and all(
        a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True)
    )
