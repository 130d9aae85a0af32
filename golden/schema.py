"""The types of a golden's fields, checked when it is opened: a damaged or foreign file is refused by field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from porter.checkpoint.strict_json import shown
from porter.errors import PorterError
from porter.golden.format import DETAILS, Stored, read_lines

REMEDY = "record the golden again"


@dataclass(frozen=True)
class Table:
    """An object whose every value has the type `values`."""

    values: Any


@dataclass(frozen=True)
class Count:
    """An integer that is not negative."""


COUNT = Count()
NUMBER = (int, float)
TOKEN_ROWS = ([[int]], None)

MODEL = {
    "class": str,
    "config": (dict, None),
    "attn_implementation": (str, None),
    "parameters": COUNT,
    "checkpoint": (str, None),
    "digests": (Table(str), None),
    "unverified": [str],
    "weights": bool,
    "tied": Table(str),
}
HEADER = {
    "detail": str,
    "dtype": (str, None),
    "device": str,
    "model": MODEL,
    "environment": dict,
    "created": str,
    "modules": (str, None),
    "prompts": ([str], None),
}
BATCH = {
    "first_step": COUNT,
    "steps": COUNT,
    "tokens": TOKEN_ROWS,
    "attention_mask": TOKEN_ROWS,
    "generated": [([int], None)],
}
MANIFEST = {
    **HEADER,
    "steps": COUNT,
    "batches": [BATCH],
    "tokens": TOKEN_ROWS,
    "attention_mask": TOKEN_ROWS,
    "complete": bool,
    "records": COUNT,
    "missed": [{"module": str, "why": str}],
    "shared": dict,
}
RECORD = {"step": COUNT, "call": COUNT, "module": str, "kind": str, "inputs": dict, "outputs": dict, "batch": COUNT}
CALL = {"dict": {"args": {"list": list}, "kwargs": {"dict": dict}}}
STEP_END = {
    "end": str,
    "step": COUNT,
    "past_length": COUNT,
    "tokens": TOKEN_ROWS,
    "attention_mask": TOKEN_ROWS,
    "generated": ([int], None),
}
STORED = {
    "id": str,
    "dtype": str,
    "shape": [COUNT],
    "offset": COUNT,
    "bytes": COUNT,
    "digest": str,
}
SKETCH = {"numel": COUNT, "norm": (*NUMBER, None), "seed": int}
STATISTICS = {"nan": COUNT, "inf": COUNT, **dict.fromkeys(("min", "max", "mean", "l2"), (*NUMBER, None))}
TENSOR = {"tensor": (str, None), "dtype": str, "shape": [COUNT], "stride": [int], "digest": str, "stats": STATISTICS}


def check_manifest(manifest: Mapping[str, Any], complete: bool, where: str) -> None:
    """PorterError naming `where` and the field of a manifest (of a header, unless `complete`) that is malformed."""
    _check(manifest, MANIFEST if complete else HEADER, "", where)
    if manifest["detail"] not in DETAILS:
        raise PorterError(f"{where}: detail is {shown(manifest['detail'])}; must be one of {', '.join(DETAILS)}")
    if manifest["dtype"] is not None:
        _check_dtype(manifest["dtype"], "dtype", where)


def read_stored(path: Path) -> list[Stored]:
    """The whole lines of a tensor index; PorterError naming the line and field that is malformed."""
    lines = read_lines(path)[0]
    for number, line in enumerate(lines, start=1):
        check_stored(line, f"{path}:{number}")
    return [Stored.from_json(line) for line in lines]


def read_records(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The whole lines of the records, and whether the file ends cleanly; PorterError as `read_stored`."""
    lines, whole = read_lines(path)
    for number, line in enumerate(lines, start=1):
        check_record(line, f"{path}:{number}")
    return lines, whole


def check_stored(line: Any, where: str) -> None:
    """PorterError for a line of the index that is malformed, or whose bytes are not those of its dtype and shape."""
    _check(line, STORED, "", where)
    if line.keys() - {*STORED, "sketch"}:
        raise PorterError(f"{where}: unknown fields {sorted(line.keys() - {*STORED, 'sketch'})}; {REMEDY}")
    if line.get("sketch") is not None:
        _check(line["sketch"], SKETCH, "sketch", where)
    elements = 1
    for size in line["shape"]:
        elements *= size
    if elements * _check_dtype(line["dtype"], "dtype", where).itemsize != line["bytes"]:
        raise PorterError(f"{where}: bytes is {line['bytes']}, which is not {line['dtype']} {line['shape']}; {REMEDY}")


def check_record(line: Any, where: str) -> None:
    """PorterError for a line of the records that is malformed: a module call, or the end of a step or batch."""
    if isinstance(line, dict) and "end" in line:
        _check(line, STEP_END if line["end"] == "step" else {"end": str}, "", where)
        return
    _check(line, RECORD, "", where)
    _check(line["inputs"], CALL, "inputs", where)
    for name in ("inputs", "outputs"):
        _check_node(line[name], name, where)


def _check_node(node: Any, field: str, where: str) -> None:
    if not isinstance(node, dict):
        raise _wrong(node, "an object", field, where)
    if "tensor" in node:
        _check(node, TENSOR, field, where)
        _check_dtype(node["dtype"], f"{field}.dtype", where)
        if len(node["shape"]) != len(node["stride"]):
            raise _wrong(node["stride"], f"{len(node['shape'])} strides", f"{field}.stride", where)
        return
    for kind in ("list", "tuple"):
        if kind in node:
            if not isinstance(node[kind], list):
                raise _wrong(node[kind], "a list", f"{field}.{kind}", where)
            for place, child in enumerate(node[kind]):
                _check_node(child, f"{field}.{kind}[{place}]", where)
            return
    if "dict" in node:
        if not isinstance(node["dict"], dict):
            raise _wrong(node["dict"], "an object", f"{field}.dict", where)
        if not isinstance(node.get("class"), str | None):
            raise _wrong(node["class"], "a string", f"{field}.class", where)
        for name, child in node["dict"].items():
            _check_node(child, f"{field}.dict.{name}", where)
    elif "opaque" in node:
        _check(node, {"opaque": str, "repr": str}, field, where)
    elif not {"value", "cache"} & node.keys():
        raise _wrong(node, "a tensor, value, list, tuple, dict or cache", field, where)


def _check_dtype(name: str, field: str, where: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise _wrong(name, "a dtype of torch", field, where)
    return dtype


def _check(value: Any, wanted: Any, field: str, where: str) -> None:
    if isinstance(wanted, tuple):
        if not any(_is(value, kind) for kind in wanted):
            raise _wrong(value, " or ".join(_words(kind) for kind in wanted), field, where)
        wanted = next(kind for kind in wanted if _is(value, kind))
    elif not _is(value, wanted):
        raise _wrong(value, _words(wanted), field, where)
    if isinstance(wanted, dict):
        for name, kind in wanted.items():
            path = f"{field}.{name}" if field else name
            if name not in value:
                raise PorterError(f"{where}: {path} is missing; {REMEDY}")
            _check(value[name], kind, path, where)
    elif isinstance(wanted, list):
        for place, item in enumerate(value):
            _check(item, wanted[0], f"{field}[{place}]", where)
    elif isinstance(wanted, Table):
        for name, item in value.items():
            _check(item, wanted.values, f"{field}.{name}", where)


def _is(value: Any, kind: Any) -> bool:
    """Whether `value` is of the outermost type of `kind`."""
    if kind is None:
        return value is None
    if isinstance(kind, Count):
        return type(value) is int and value >= 0
    if isinstance(kind, dict | Table):
        return isinstance(value, dict)
    return type(value) is (list if isinstance(kind, list) else kind)


def _words(kind: Any) -> str:
    names = {str: "a string", int: "an integer", float: "a number", bool: "true or false", list: "a list"}
    if kind is None:
        return "null"
    if isinstance(kind, Count):
        return "a count"
    if isinstance(kind, list):
        return f"a list of {_words(kind[0]).removeprefix('a ').removeprefix('an ')}s"
    return names.get(kind, "an object") if isinstance(kind, type) else "an object"


def _wrong(value: Any, expected: str, field: str, where: str) -> PorterError:
    at = f"{field} is" if field else "found"
    return PorterError(f"{where}: {at} {shown(repr(value))}, expected {expected}; {REMEDY}")
