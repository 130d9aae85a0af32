"""Nodes: how the arguments and results of a module are written as JSON, and rebuilt from it.

A node is one of
``{"tensor": id, "dtype", "shape", "stride", "digest", "stats"}``, ``{"value": x}`` (None, bool, int, float, str),
``{"value": text, "type": "dtype" | "device" | "float"}``, ``{"list": [node]}``, ``{"tuple": [node]}``,
``{"dict": {name: node}, "class": optional class path}``, ``{"cache": true, "class": name}``, and
``{"opaque": class path, "repr": text}`` for what can be neither stored nor rebuilt.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from porter.errors import PorterError

Node = dict[str, Any]

JsonText = str

json_text: Callable[[Any], JsonText] = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode
"""JSON of plain values, on one line."""

quoted = lru_cache(maxsize=4096)(json_text)
"""JSON of a name that comes again and again."""

_REPR_LENGTH = 200


def class_path(kind: type) -> str:
    """``module.qualname`` of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def is_cache(value: object) -> bool:
    """Whether ``value`` is a key-value cache: anything that can be updated and tells its length, not a module."""
    return (
        callable(getattr(value, "update", None))
        and callable(getattr(value, "get_seq_length", None))
        and not isinstance(value, torch.nn.Module)
    )


def has_plain_storage(tensor: Tensor) -> bool:
    """Whether the tensor's elements lie in ordinary strided memory that can be copied byte by byte."""
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized


def encode(value: Any, encode_tensor: Callable[[Tensor], JsonText]) -> JsonText:
    """The node of any Python value, as JSON; ``encode_tensor`` stores one tensor and returns its node."""
    plain = _PLAIN.get(type(value))
    if plain is not None:
        return plain(value)
    if isinstance(value, Tensor):
        return encode_tensor(value) if has_plain_storage(value) else _opaque(value, f"{value.layout} on {value.device}")
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return f'{{"{kind}": [{", ".join([encode(item, encode_tensor) for item in value])}]}}'
    if isinstance(value, (torch.dtype, torch.device)):
        return json_text({"value": str(value), "type": type(value).__name__})
    if is_cache(value):
        return json_text({"cache": True, "class": type(value).__name__})
    return _encode_named(value, encode_tensor)


def _encode_named(value: Any, encode_tensor: Callable[[Tensor], JsonText]) -> JsonText:
    if isinstance(value, dict) or (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
        fields, named = dict(value), type(value) is not dict
        if not all(isinstance(key, str) for key in fields):
            return _opaque(value, repr(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields, named = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, True
    else:
        return _opaque(value, repr(value))
    items = [f"{quoted(key)}: {encode(item, encode_tensor)}" for key, item in fields.items()]
    return f'{{"dict": {{{", ".join(items)}}}' + (
        f', "class": {json_text(class_path(type(value)))}}}' if named else "}"
    )


def _opaque(value: Any, text: str) -> JsonText:
    return json_text({"opaque": class_path(type(value)), "repr": text[:_REPR_LENGTH]})


def _encode_float(value: float) -> JsonText:
    return json_text({"value": value} if math.isfinite(value) else {"value": str(value), "type": "float"})


_PLAIN: dict[type, Callable[[Any], JsonText]] = {
    type(None): lambda value: '{"value": null}',
    bool: lambda value: '{"value": true}' if value else '{"value": false}',
    int: lambda value: f'{{"value": {value}}}',
    str: lambda value: json_text({"value": value}),
    float: _encode_float,
}


def tensor_nodes(node: Node) -> Iterator[Node]:
    """Every tensor node inside ``node``, in order."""
    if "tensor" in node:
        yield node
    for children in (node.get("list"), node.get("tuple"), (node.get("dict") or {}).values()):
        for child in children or ():
            yield from tensor_nodes(child)


def decode(node: Node, decode_tensor: Callable[[Node], Tensor], cache: Any = None) -> Any:
    """The Python value of a node: tensors through ``decode_tensor``, every cache replaced by ``cache``.

    Raises PorterError for an opaque node: the value was not recorded, so nothing may be computed from it.
    """
    if "tensor" in node:
        return decode_tensor(node)
    if "value" in node:
        return _decode_value(node)
    if "cache" in node:
        return cache
    if "list" in node:
        return [decode(child, decode_tensor, cache) for child in node["list"]]
    if "tuple" in node:
        return tuple(decode(child, decode_tensor, cache) for child in node["tuple"])
    if "dict" in node:
        fields = {key: decode(child, decode_tensor, cache) for key, child in node["dict"].items()}
        return _rebuild(node.get("class"), fields)
    if "opaque" in node:
        raise PorterError(f"the golden holds no value for a {node['opaque']} ({node['repr']}): it cannot be replayed")
    raise PorterError(f"unknown node in records.jsonl with the keys {sorted(node)}: recorded by a newer porter?")


_VALUE_TYPES: dict[str, Callable[[str], Any]] = {
    "float": float,
    "device": torch.device,
    "dtype": lambda text: getattr(torch, text.removeprefix("torch.")),
}


def _decode_value(node: Node) -> Any:
    if "type" not in node:
        return node["value"]
    try:
        return _VALUE_TYPES[node["type"]](node["value"])
    except (LookupError, AttributeError, ValueError, TypeError, RuntimeError) as error:
        raise PorterError(
            f"records.jsonl: {node['value']!r} is no {node['type']!r} that torch has; record the golden again"
        ) from error


def _rebuild(path: str | None, fields: dict[str, Any]) -> Any:
    """A dict, or the object whose fields these are.

    Only transformers' own output classes are instantiated: a golden is data, and naming a class in it must not make
    porter import and call arbitrary code. Other dataclasses come back with the same attributes.
    """
    if path is None:
        return fields
    if path.startswith("transformers.") and not path.startswith("transformers_modules."):
        from transformers.utils.generic import ModelOutput

        module, _, name = path.rpartition(".")
        try:
            kind = getattr(importlib.import_module(module), name, None)
            if isinstance(kind, type) and issubclass(kind, ModelOutput):
                return kind(**fields)
        except (ImportError, TypeError, ValueError) as error:
            raise PorterError(f"records.jsonl: no {path} can be rebuilt ({error}); record the golden again") from error
    return SimpleNamespace(**fields)
