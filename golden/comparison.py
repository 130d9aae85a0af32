"""Comparing two recordings tensor by tensor, as fast as their files are read.

This says how far outputs are apart, not whose fault that is: errors that a module inherits are in its row. `porter
align` separates the two.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from porter.golden.format import Record
from porter.golden.native import kernels, threads
from porter.golden.node import Node
from porter.golden.sketch import cosine, relative_error
from porter.golden.store import Golden
from porter.kernels.cpu.layout import FLOAT_CODES

_Five = ctypes.c_double * 5


@dataclass(frozen=True)
class Distance:
    """Between one tensor of a golden and another's. ``error``: relative L2; ``largest``: max |difference|, None from
    sketches; ``deviation``: the standard error of ``error``, 0.0 where it is exact."""

    error: float
    cosine: float
    largest: float | None
    deviation: float = 0.0


@dataclass(frozen=True)
class Row:
    """One tensor of one call in both recordings. ``place`` is its path, as ``inputs.args.0`` or ``outputs``. Without a
    distance ``why`` says why there is none."""

    step: int
    call: int
    module: str
    place: str
    distance: Distance | None
    why: str = ""


def compare(golden: Golden, other: Golden) -> Iterator[Row]:
    """A row for every floating-point tensor of the golden, in its order; tensors are read and verified once per pair
    of contents, and not at all where their digests are equal."""
    theirs = {(record.step, record.call, record.module): record for record in other.records}
    known: dict[tuple[str, str], Distance] = {}
    for record in golden.records:
        place = record.step, record.call, record.module
        found = dict(_tensors(theirs[place])) if place in theirs else None
        for name, node in _tensors(record):
            if found is None or name not in found:
                yield Row(*place, name, None, "not in the other recording")
            elif found[name]["shape"] != node["shape"]:
                yield Row(*place, name, None, f"shapes are {node['shape']} and {found[name]['shape']}")
            elif node["digest"] == found[name]["digest"]:
                yield Row(*place, name, Distance(0.0, 1.0, 0.0))
            elif None in (ids := (node["tensor"], found[name]["tensor"])):
                yield Row(*place, name, None, "recorded as statistics alone")
            else:
                if ids not in known:
                    known[ids] = _distance(golden, other, *ids)
                yield Row(*place, name, known[ids])


def difference(candidate: Tensor, golden: Tensor) -> Distance:
    """The distance of two floating-point tensors of as many elements, over the golden's norm."""
    a, b = (tensor.detach().cpu().contiguous().view(-1) for tensor in (candidate, golden))
    native, codes = kernels(), (FLOAT_CODES.get(a.dtype), FLOAT_CODES.get(b.dtype))
    if native is not None and None not in codes and a.numel():
        sums = _Five()
        native.difference(sums, a.data_ptr(), b.data_ptr(), a.numel(), *codes, threads(a))
        found = tuple(sums)
        # Float32 products overflow, and underflow where all is tiny: then every sum is taken in float64.
        if all(math.isfinite(value) for value in found) and min(found[2:4]) > 1e-20 * a.numel():
            return _from_sums(*found)
    a, b = a.double(), b.double()
    d = a - b
    largest = float(d.abs().max()) if d.numel() else 0.0
    return _from_sums(float(d @ d), float(a @ b), float(a @ a), float(b @ b), largest)


def _from_sums(squared: float, product: float, first: float, second: float, largest: float) -> Distance:
    scale = math.sqrt(first) * math.sqrt(second)
    error = math.sqrt(squared / second) if second > 0 else 0.0 if squared == 0 else math.inf
    return Distance(error, product / scale if scale > 0 else math.nan, largest)


def _distance(golden: Golden, other: Golden, mine: str, theirs: str) -> Distance:
    if golden.detail == other.detail == "full":
        return difference(other.tensor(theirs), golden.tensor(mine))
    a, b = other.sketch(theirs), golden.sketch(mine)
    error, deviation = relative_error(a, b)
    return Distance(error, cosine(a, b)[0], None, deviation)


def _tensors(record: Record) -> Iterator[tuple[str, Node]]:
    for name, node in (("inputs", record.inputs), ("outputs", record.outputs)):
        yield from _floating(name, node)


def _floating(path: str, node: Node) -> Iterator[tuple[str, Node]]:
    if "tensor" in node:
        if getattr(torch, node["dtype"]).is_floating_point:
            yield path, node
        return
    for kind in ("list", "tuple"):
        for number, child in enumerate(node.get(kind, ())):
            yield from _floating(f"{path}.{number}", child)
    for key, child in node.get("dict", {}).items():
        yield from _floating(f"{path}.{key}", child)
