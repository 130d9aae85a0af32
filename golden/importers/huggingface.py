"""Dumps of transformers' ``model_addition_debugger_context``: a tree of calls in JSON, tensors beside it.

``<Class>_debug_tree_FULL_TENSORS.json`` is ``{"module_path", "inputs": {"args", "kwargs"}, "outputs", "children"}``,
recursively; a tensor is ``{"shape": "torch.Size([1, 5])", "dtype", "value", "mean", "std", "min", "max"}``, where value
names a safetensors file (``use_repr=False``) or holds the printed lines (``use_repr=True``, four digits: statistics
are all there is). What it does not write: outputs of modules that have children (but for the whole model's, whose
files are there), class names, the layers between the first and the last with ``do_prune_layers`` (the default), and all
calls but the last of a module that is called twice, whose files it writes over. One forward a dump: the last.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from porter.errors import PorterError
from porter.golden.importers.dump import (
    CACHE,
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
from porter.golden.importers.files import REMEDY, description, inside, load_safetensors

_SUFFIX = "_debug_tree_FULL_TENSORS.json"
_SHAPE = re.compile(r"torch\.Size\(\[([\d, ]*)\]\)")
_NUMBER = re.compile(r"tensor\(\s*([^,)\s]+)")
_CACHE = re.compile(r"\w*Cache\b")
_LAYER = re.compile(r"(.*\.)(\d+)")
_CONSTANTS = {"None": None, "True": True, "False": False}
_NO_OUTPUT = "the debugger writes no outputs of modules that have children"
_OVERWRITTEN = "called again later in the same forward: the debugger wrote over its files"


def read_huggingface(path: Path, rank: int | None = None) -> Dump:
    """Open a dump: the folder, or its ``..._FULL_TENSORS.json``."""
    if rank:
        raise PorterError(f"--rank {rank}: the debugger of transformers dumps rank 0 alone")
    file = _file(path)
    tree = _Tree(file, description(file))
    calls = list(tree.calls())
    values = [leaf for call in calls for leaf in leaves([call.args, call.kwargs, call.output])]
    floating = [leaf for leaf in values if isinstance(leaf, Held | Measured) and leaf.dtype.is_floating_point]
    full = any(isinstance(leaf, Held) for leaf in floating)
    missing = [Missing("class names of modules", "the debugger writes paths alone"), *tree.missing()]
    if not full:
        missing.append(Missing("elements of tensors", "dumped with use_repr=True, which prints four digits"))

    def steps() -> Iterator[Step]:
        yield Step(calls)

    return Dump(
        "hf", full, most_common_dtype(iter(values)), steps, root=tree.root, missing=missing, lost=dict(tree.lost)
    )


def _file(path: Path) -> Path:
    if path.is_file():
        return path
    found = sorted(path.glob(f"*{_SUFFIX}"))
    if len(found) != 1:
        raise PorterError(f"{path}: holds {len(found)} files *{_SUFFIX}, expected one; name the file")
    return found[0]


class _Tree:
    """The call tree of one forward."""

    def __init__(self, file: Path, tree: dict[str, Any]) -> None:
        self._file = file
        self._tree = tree
        root = tree.get("module_path")
        if not isinstance(root, str) or not root.isidentifier():
            raise PorterError(f"{file}: module_path is {root!r}, expected the model's class name; {REMEDY}")
        self.root = root
        self.lost: dict[str, str] = {}
        self._later: Counter[str] = Counter(node["module_path"] for node in self._nodes(tree))
        self.overwritten = False

    def calls(self) -> Iterator[Call]:
        """Every call of which the output is known, in the order of returning."""
        for node in self._nodes(self._tree):
            path = node["module_path"]
            self._later[path] -= 1
            self.overwritten = self._later[path] > 0
            name = path.removeprefix(self.root).removeprefix(".")
            inputs = node.get("inputs") or {}
            outputs = node.get("outputs")
            if node is self._tree:
                outputs = self._root_output() if outputs is None else self._value(outputs)
            elif outputs is not None:
                outputs = self._value(outputs)
            if outputs is None:
                self.lost[name] = _NO_OUTPUT
                continue
            if self.overwritten:
                self.lost.setdefault(f"{name} (but for its last call)", _OVERWRITTEN)
            args = [self._value(value) for value in inputs.get("args", [])]
            kwargs = {str(key): self._value(value) for key, value in inputs.get("kwargs", {}).items()}
            yield Call(name, self.root if not name else None, args, kwargs, outputs)

    def missing(self) -> Iterator[Missing]:
        """Layers that the debugger pruned, by the gaps in their numbers."""
        numbers: dict[str, set[int]] = {}
        for node in self._nodes(self._tree):
            match = _LAYER.fullmatch(node["module_path"])
            if match:
                numbers.setdefault(match[1], set()).add(int(match[2]))
        for prefix, found in numbers.items():
            gaps = sorted(set(range(max(found))) - found)
            if gaps:
                name = prefix.removeprefix(f"{self.root}.")
                why = "pruned by the debugger; dump with do_prune_layers=False"
                yield Missing(f"{name}{gaps[0]}" + (f" to {name}{gaps[-1]}" if len(gaps) > 1 else ""), why)

    def _nodes(self, node: Any) -> Iterator[dict[str, Any]]:
        if not isinstance(node, dict) or not isinstance(node.get("module_path"), str):
            raise PorterError(f"{self._file}: a call without module_path; {REMEDY}")
        for child in node.get("children") or ():
            yield from self._nodes(child)
        yield node

    def _root_output(self) -> dict[str, Any] | None:
        """The debugger drops the whole model's outputs from the tree, but has written their files."""
        found = {}
        prefix = f"{self.root}_outputs_"
        for file in sorted(self._file.parent.glob(f"{prefix}*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                described = opened.get_slice("data")
                dtype, shape = opened.get_tensor("data").dtype, tuple(described.get_shape())
            held = Held(partial(load_safetensors, file, "data", dtype, shape), dtype, shape)
            found[file.stem.removeprefix(prefix)] = held
        return found or None

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            return tuple(self._value(item) for item in value)
        if isinstance(value, dict):
            if {"shape", "dtype", "value"} <= value.keys():
                return self._tensor(value)
            return {str(name): self._value(item) for name, item in value.items()}
        if value in _CONSTANTS:
            return _CONSTANTS[value]
        if isinstance(value, str) and _CACHE.match(value):
            return CACHE
        return _literal(value)

    def _tensor(self, about: dict[str, Any]) -> Tensor | Held | Measured:
        where = str(self._file)
        match = _SHAPE.fullmatch(str(about["shape"]))
        if match is None:
            raise PorterError(f"{where}: shape is {about['shape']!r}, expected torch.Size([...]); {REMEDY}")
        shape = tuple(int(size) for size in match[1].split(",") if size.strip())
        dtype = dtype_named(str(about["dtype"]), where)
        if isinstance(about["value"], str) and not self.overwritten:
            file = inside(self._file.parent, about["value"], where)
            return Held(partial(load_safetensors, file, "data", dtype, shape), dtype, shape)
        printed = None if dtype.is_floating_point else _printed(about["value"], dtype, shape)
        return Measured(dtype, shape, _statistics(about, math.prod(shape))) if printed is None else printed


def _literal(value: Any) -> Any:
    try:
        plain = ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return Unknown(str(value))
    return plain if isinstance(plain, int | float | str) else Unknown(str(value))


def _printed(lines: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor | None:
    """An integer tensor from what print() shows of it; None where elements are left out."""
    text = "".join(lines) if isinstance(lines, list) else ""
    match = re.fullmatch(r"tensor\((.*?)(, dtype=[\w.]+)?\)", text)
    if match is None or "..." in text:
        return None
    try:
        tensor = torch.tensor(ast.literal_eval(match[1]), dtype=dtype)
    except (ValueError, SyntaxError, TypeError):
        return None
    return tensor if tuple(tensor.shape) == shape else None


def _statistics(about: dict[str, Any], numel: int) -> dict[str, Any]:
    """The debugger prints the standard deviation (over n - 1), from which the norm follows: sum x^2 is
    n mean^2 + (n - 1) std^2. It counts no elements that are not finite: one is counted where the mean shows it."""
    mean, std, least, greatest = (_number(about.get(name)) for name in ("mean", "std", "min", "max"))
    squares = None if mean is None else numel * mean**2 + (numel - 1) * std**2 if std is not None else mean**2
    numbers = {"min": least, "max": greatest, "mean": mean, "l2": None if squares is None else math.sqrt(squares)}
    text = str(about.get("mean"))
    return {**numbers, "nan": int("nan" in text), "inf": int("inf" in text)}


def _number(text: Any) -> float | None:
    match = _NUMBER.match(text) if isinstance(text, str) else None
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None
