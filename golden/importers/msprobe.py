"""Dumps of msprobe (PyPI `mindstudio-probe`): ``dump.json`` with a file per tensor, or with statistics alone.

A dump has ``step<N>/<rank<N> or proc<pid>>/dump.json``; ``data`` maps ``Module.<name>.<class>.forward.<call>`` to
``input_args`` (list), ``input_kwargs``, ``output`` (always a list) and ``parameters``, in the order of returning, and
``construct.json`` each entry to the one that called it. A tensor is ``{"type", "dtype", "shape", "Max", "Min", "Mean",
"Norm", "data_name"}``, the last only with task tensor. Levels L1 and mix also hold calls of single functions, which no
module of a golden corresponds to. The model's own call is not dumped: only those of its modules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from porter.errors import PorterError
from porter.golden.importers.dump import (
    CACHE,
    CACHES,
    Call,
    Dump,
    Held,
    Measured,
    Missing,
    Step,
    Unknown,
    dtype_named,
    leaves,
    most_common_dtype,
)
from porter.golden.importers.files import REMEDY, description, inside, load_tensor

_ENTRY = re.compile(r"(?:Module|Cell)\.(?P<module>.+)\.(?P<kind>[^.]+)\.forward\.(?P<call>\d+)")
_ROOT_WHY = "msprobe does not dump the model's own call: put together from its modules' token ids and logits"


def read_msprobe(path: Path, rank: int | None = None) -> Dump:
    """Open the dump of one rank: ``dump.json``, its folder, a step's folder, or the folder of all steps."""
    files = _files(path, rank)
    opened = [(file, description(file)) for file in files]
    task, folders = _task(opened), [_data_folder(file, about) for file, about in opened]
    parsed = [
        _Parsed(file, about, folder, _parents(file)) for (file, about), folder in zip(opened, folders, strict=True)
    ]
    functions = sum(each.functions for each in parsed)
    missing = [
        Missing("the model's own call", _ROOT_WHY),
        Missing("kinds of sequences", "msprobe writes tuples as lists"),
    ]
    if functions:
        missing.append(
            Missing(f"{functions} calls of functions", "a golden holds modules: API-level entries are left out")
        )
    every = [call for each in parsed for call in each.calls()]
    if not every:
        raise PorterError(f"{files[0]}: holds no call of a module; dump with level L0 or mix")
    dtype = most_common_dtype(leaf for call in every for leaf in leaves([call.args, call.kwargs, call.output]))

    def steps() -> Iterator[Step]:
        for each in parsed:
            yield from each.steps()

    dump = Dump("msprobe", task == "tensor", dtype, steps, missing=missing)
    for each in parsed:
        dump.parameters.update(each.parameters())
    return dump


def _files(path: Path, rank: int | None) -> list[Path]:
    """The dump.json of every step, of one rank."""
    if path.is_file():
        return [path]
    if (path / "dump.json").is_file():
        return [path / "dump.json"]
    steps = sorted(path.glob("step*"), key=lambda step: (len(step.name), step.name)) or [path]
    found = []
    for step in steps:
        ranks = sorted(step.glob("*/dump.json"))
        if rank is not None:
            ranks = [file for file in ranks if file.parent.name == f"rank{rank}"]
        if len(ranks) > 1:
            names = ", ".join(rank.parent.name for rank in ranks)
            raise PorterError(
                f"{step}: holds {len(ranks)} ranks ({names}); import each with --rank, then `porter golden gather`"
            )
        found += ranks
    if not found:
        raise PorterError(f"{path}: no dump.json; name the folder that msprobe's dump_path was set to")
    return found


def _task(opened: list[tuple[Path, dict[str, Any]]]) -> str:
    tasks = {str(about.get("task")) for _, about in opened}
    file, about = opened[0]
    if about.get("framework", "pytorch") != "pytorch":
        raise PorterError(f"{file}: framework is {about['framework']!r}; only dumps of PyTorch are read")
    if tasks - {"tensor", "statistics"} or len(tasks) != 1:
        raise PorterError(f"{file}: task is {', '.join(sorted(tasks))}; dump with task tensor or statistics")
    if not isinstance(about.get("data"), dict):
        raise PorterError(f"{file}: data is missing or no object; {REMEDY}")
    return tasks.pop()


def _data_folder(file: Path, about: dict[str, Any]) -> Path:
    """Where the tensors lie: beside dump.json, wherever the dump was moved to since."""
    named = about.get("dump_data_dir")
    return file.parent / (Path(named).name if isinstance(named, str) and named else "dump_tensor_data")


def _parents(file: Path) -> dict[str, Any]:
    path = file.parent / "construct.json"
    return description(path) if path.is_file() else {}


class _Parsed:
    """One dump.json."""

    def __init__(self, file: Path, about: dict[str, Any], folder: Path, parents: dict[str, Any]) -> None:
        self._file = file
        self._folder = folder
        self._parents = parents
        self._entries: list[tuple[str, re.Match[str], dict[str, Any]]] = []
        self.functions = 0
        for key, entry in about["data"].items():
            match = _ENTRY.fullmatch(key)
            if match is None or not isinstance(entry, dict):
                self.functions += not key.endswith("backward") and ".backward." not in key
            else:
                self._entries.append((key, match, entry))

    def calls(self) -> list[Call]:
        """Every call of a module."""
        return [self._call(match, entry) for _, match, entry in self._entries]

    def steps(self) -> Iterator[Step]:
        """Forwards of the model: a new one begins where the module that was entered first is entered again."""
        calls: list[Call] = []
        first: str | None = None
        began: str | None = None
        for key, match, entry in self._entries:
            top = self._top(key)
            name = _ENTRY.fullmatch(top)
            assert name is not None, "the top of a module entry is one"
            first = first or name["module"]
            if name["module"] == first and top != began:
                if calls:
                    yield Step(calls)
                calls, began = [], top
            calls.append(self._call(match, entry))
        if calls:
            yield Step(calls)

    def parameters(self) -> dict[str, Held]:
        """Weights by name, where they were dumped."""
        found = {}
        for _, match, entry in self._entries:
            for name, about in _fields(entry, "parameters", dict).items():
                value = self._value(about)
                if isinstance(value, Held):
                    found[f"{match['module']}.{name}"] = value
        return found

    def _top(self, key: str) -> str:
        seen = {key}
        while isinstance(parent := self._parents.get(key), str) and _ENTRY.fullmatch(parent) and parent not in seen:
            key = parent
            seen.add(key)
        return key

    def _call(self, match: re.Match[str], entry: dict[str, Any]) -> Call:
        kwargs = {name: self._value(value) for name, value in _fields(entry, "input_kwargs", dict).items()}
        # A cache is written as null. One that is empty does what none does, so null may always be taken for a cache.
        kwargs |= {name: CACHE for name in CACHES if name in kwargs and kwargs[name] is None}
        output = [self._value(value) for value in _fields(entry, "output", list)]
        return Call(
            match["module"],
            match["kind"],
            [self._value(value) for value in _fields(entry, "input_args", list)],
            kwargs,
            output[0] if len(output) == 1 else tuple(output),
        )

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            return tuple(self._value(item) for item in value)
        if not isinstance(value, dict):
            return value
        if "type" not in value or isinstance(value["type"], dict):
            return {str(name): self._value(item) for name, item in value.items()}
        if value["type"] == "torch.Tensor":
            return self._tensor(value)
        read = _PLAIN.get(value["type"])
        return Unknown(f"{value['type']} {value.get('value')}") if read is None else read(value.get("value"))

    def _tensor(self, about: dict[str, Any]) -> Held | Measured:
        where = str(self._file)
        shape = about.get("shape")
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise PorterError(f"{where}: shape is {shape!r}, expected a list of counts; {REMEDY}")
        dtype = dtype_named(str(about.get("dtype")), where)
        if about.get("data_name") is None:
            return Measured(dtype, tuple(shape), _statistics(about))
        file = inside(self._folder, about["data_name"], where)
        return Held(partial(load_tensor, file, dtype, tuple(shape)), dtype, tuple(shape))


_PLAIN: dict[str, Callable[[Any], Any]] = {name: lambda value: value for name in ("bool", "int", "float", "str")}


def _fields(entry: dict[str, Any], name: str, kind: type) -> Any:
    value = entry.get(name)
    return value if isinstance(value, kind) else kind()


def _statistics(about: dict[str, Any]) -> dict[str, Any]:
    """msprobe counts no elements that are not finite: one is counted where an extreme shows it."""
    least, greatest = about.get("Min"), about.get("Max")
    extremes = [number for number in (least, greatest) if isinstance(number, float)]
    finite = {
        name: number if isinstance(number, int | float) and math.isfinite(number) else None
        for name, number in (("min", least), ("max", greatest), ("mean", about.get("Mean")), ("l2", about.get("Norm")))
    }
    counts = {"nan": int(any(map(math.isnan, extremes))), "inf": int(any(map(math.isinf, extremes)))}
    return {**finite, **counts}
