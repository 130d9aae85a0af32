"""Models whose tensors stay on disk: one decoder layer at a time is in memory.

A streamed model is built with placeholders (meta tensors) for everything a checkpoint stores. `reach` brings the part
around a module in and puts the last one out; a module that is called outside that part brings in what it needs and
lets it go when it returns. A placeholder's dtype is the dtype that is asked for: a context that puts a model into
float64 converts the placeholders, and what is read while it lasts arrives in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from porter.alignment.memory import give_back

Load = Callable[[str], Tensor]
PLACE = "_porter_streamed"

Table = dict[str, Any]
Filled = list[tuple[Table, str, Tensor]]


@dataclass(eq=False)
class Stream:
    """Where the tensors of one model come from. `load` gives a fresh tensor by the model's own name.

    `placeholders` are the meta tensors by name; `adopted` replaces what `load` gives for a name.
    """

    model: nn.Module
    load: Load
    device: torch.device
    placeholders: dict[str, Tensor] = field(default_factory=dict)
    adopted: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    keep: bool = False
    """Whether what a call brought in stays after it: for a model that fits and is called again and again."""
    _part: str | None = None
    _pending: dict[int, list[Filled]] = field(default_factory=dict)

    def read(self, name: str) -> Tensor:
        """The tensor of that name as the model should hold it, fresh and in its dtype."""
        # Outside float64_mode, which would skip the rounding to the dtype that the model is stored or cast in.
        with _disable_current_modes():
            value = self.adopted[name]() if name in self.adopted else self.load(name)
            return value.to(self.device, self.placeholders[name].dtype)

    def fill(self, module: nn.Module) -> Filled:
        """Bring in what is missing at and below `module`; gives what has to be put back to let it go."""
        filled: Filled = []
        shared: dict[int, Tensor] = {}
        for owner in _owners(module):
            place: Place = owner.__dict__[PLACE]
            tables: tuple[Table, ...] = (owner._parameters, owner._buffers)
            for table in tables:
                for leaf, tensor in table.items():
                    if tensor is None or not tensor.is_meta:
                        continue
                    if id(tensor) not in shared:
                        value = self.read(joined(place.name, leaf)).to(tensor.dtype)
                        wrapped = isinstance(tensor, nn.Parameter)
                        shared[id(tensor)] = nn.Parameter(value, requires_grad=False) if wrapped else value
                    filled.append((table, leaf, tensor))
                    table[leaf] = shared[id(tensor)]
        return filled

    def reach(self, name: str) -> None:
        """Bring in the part that holds module `name` and let go of the part before it."""
        part = self.model.get_submodule(name).__dict__[PLACE].part
        if part != self._part:
            self.release()
            self._part = part
            self.fill(self.model.get_submodule(part))

    def release(self) -> None:
        """Let go of everything."""
        for name, placeholder in self.placeholders.items():
            path, _, leaf = name.rpartition(".")
            owner = self.model.get_submodule(path)
            table: Table = owner.__dict__["_parameters" if leaf in owner._parameters else "_buffers"]
            table[leaf] = placeholder
        self._part = None
        give_back()

    def adopt(self, name: str, dtype: torch.dtype, read: Callable[[], Tensor]) -> None:
        """From now on `name` is what `read` gives, in `dtype`, of the shape that it had."""
        old = self.placeholders[name]
        self.placeholders[name] = placeholder_of(torch.empty(old.shape, dtype=dtype, device="meta"), old)
        self.adopted[name] = read

    @contextmanager
    def held_as(self, placeholders: Mapping[str, Tensor]) -> Iterator[None]:
        """Those tensors in the dtypes of these placeholders while the context lasts."""
        part, before = self._part, self.placeholders
        self.placeholders = {**before, **placeholders}
        self._renew(part)
        try:
            yield
        finally:
            self.placeholders = before
            self._renew(part)

    def _renew(self, part: str | None) -> None:
        self.release()
        if part is not None:
            self.reach(part)

    def before(self, module: nn.Module) -> None:
        """A module is about to be called; one whose output is given does not run."""
        if "forward" not in module.__dict__:
            self._pending.setdefault(id(module), []).append(self.fill(module))

    def after(self, module: nn.Module) -> None:
        """A module returned or raised."""
        stack = self._pending.get(id(module))
        if stack:
            filled = stack.pop()
            # Float64 is for a context alone, and twice the size or more.
            gone = [each for each in filled if not self.keep or each[2].dtype == torch.float64]
            put_back(gone)
            if len(gone) > 1:
                give_back()
        if not stack:
            self._pending.pop(id(module), None)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole model; tied tensors count once."""
        return sum({id(tensor): tensor.nbytes for tensor in self.placeholders.values()}.values())


@dataclass(frozen=True)
class Place:
    """Where a module stands in a streamed model: its name, and the part that comes and goes with it; `deep`: with all
    that is below."""

    stream: Stream
    name: str
    part: str
    deep: bool

    def __deepcopy__(self, memo: Any) -> Place:
        return self


def streamed(model: nn.Module, load: Load, device: torch.device, names: frozenset[str]) -> nn.Module:
    """`model` with the tensors called `names` (parameters and buffers, under each of their names) left to `load`."""
    stream = Stream(model, load, device)
    for path, module in model.named_modules():
        module.__dict__[PLACE] = Place(stream, path, *part_of(model, path))
        for table in (module._parameters, module._buffers):
            for leaf, tensor in table.items():
                name = joined(path, leaf)
                if tensor is None:
                    continue
                if name in names:
                    stream.placeholders[name] = placeholder_of(tensor)
                else:
                    table[leaf] = tensor.to(device)
        module.register_forward_pre_hook(_before)
        module.register_forward_hook(_after, always_call=True)
    stream.release()
    return model


def _before(module: nn.Module, args: Any) -> None:
    module.__dict__[PLACE].stream.before(module)


def _after(module: nn.Module, args: Any, output: Any) -> None:
    module.__dict__[PLACE].stream.after(module)


def placeholder_of(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """A meta tensor of the dtype and shape of `tensor`, a parameter where `like` (by default itself) is one."""
    if tensor.is_meta and like is None:
        return tensor
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    wrapped = isinstance(tensor if like is None else like, nn.Parameter)
    return nn.Parameter(empty, requires_grad=False) if wrapped else empty


def _owners(module: nn.Module) -> Iterator[nn.Module]:
    """The modules whose tensors come with `module`: all below it, or itself alone where it holds the list of layers."""
    place = module.__dict__.get(PLACE)
    if place is not None and not place.deep:
        yield module
        return
    yield from (owner for owner in module.modules() if PLACE in owner.__dict__)


def part_of(model: nn.Module, name: str) -> tuple[str, bool]:
    """The name of the part that a module comes with, and whether all below it comes too.

    That is the decoder layer around it (the member of the outermost list of modules), or the largest module around it
    that holds no such list; a module that holds one comes alone.
    """
    steps = name.split(".") if name else []
    owner = model
    for count, step in enumerate(steps, 1):
        member = isinstance(owner, nn.ModuleList)
        owner = owner.get_submodule(step)
        if member or not any(isinstance(below, nn.ModuleList) for below in owner.modules()):
            return ".".join(steps[:count]), True
    return name, False


def put_back(filled: Filled) -> None:
    """Let go of what `Stream.fill` brought in."""
    for table, leaf, placeholder in filled:
        table[leaf] = placeholder


def joined(path: str, leaf: str) -> str:
    """The name of a tensor of the module `path`."""
    return f"{path}.{leaf}" if path else leaf
