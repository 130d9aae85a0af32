"""Comparing two recordings tensor by tensor, as fast as their files are read.

This says how far outputs are apart, not whose fault that is: errors that a module inherits are in its row. `porter
align` separates the two.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from porter.golden.format import Record
from porter.golden.native import kernels, threads
from porter.golden.node import Node
from porter.golden.sketch import Sketch, cosine, relative_error
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
    of contents, and not at all where their digests are equal. While one pair is compared the next is read."""
    rows = list(_rows(golden, other))
    pairs = list(dict.fromkeys(ids for _, ids in rows if ids is not None))
    known: dict[tuple[str, str], Distance] = {}
    distances = zip(pairs, _distances(golden, other, pairs), strict=True)
    for row, ids in rows:
        while ids is not None and ids not in known:
            known.update([next(distances)])
        yield row if ids is None else replace(row, distance=known[ids])


def _rows(golden: Golden, other: Golden) -> Iterator[tuple[Row, tuple[str, str] | None]]:
    """The rows, and the ids of the two tensors where their distance has yet to be measured."""
    theirs = {(record.step, record.call, record.module): record for record in other.records}
    for record in golden.records:
        place = record.step, record.call, record.module
        found = dict(_tensors(theirs[place])) if place in theirs else None
        for name, node in _tensors(record):
            if found is None or name not in found:
                yield Row(*place, name, None, "not in the other recording"), None
            elif found[name]["shape"] != node["shape"]:
                yield Row(*place, name, None, f"shapes are {node['shape']} and {found[name]['shape']}"), None
            elif node["digest"] == found[name]["digest"]:
                yield Row(*place, name, Distance(0.0, 1.0, 0.0)), None
            elif None in (ids := (node["tensor"], found[name]["tensor"])):
                yield Row(*place, name, None, "recorded as statistics alone"), None
            else:
                yield Row(*place, name, None), ids


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


def _distances(golden: Golden, other: Golden, pairs: Sequence[tuple[str, str]]) -> Iterator[Distance]:
    """Of each pair in order. A thread for each recording reads and verifies one tensor ahead."""
    full = golden.detail == other.detail == "full"
    with ThreadPoolExecutor(1) as mine, ThreadPoolExecutor(1) as theirs:

        def read(ids: tuple[str, str]) -> tuple[Future[Any], Future[Any]]:
            first = mine.submit(golden.tensor if full else golden.sketch, ids[0])
            return theirs.submit(other.tensor if full else other.sketch, ids[1]), first

        ahead = read(pairs[0]) if pairs else None
        for number in range(1, len(pairs) + 1):
            assert ahead is not None, "there is a pair"
            a, b = (each.result() for each in ahead)
            ahead = read(pairs[number]) if number < len(pairs) else None
            yield difference(a, b) if full else _between(a, b)


def _between(a: Sketch, b: Sketch) -> Distance:
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
