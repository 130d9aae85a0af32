"""Comparing an output with a golden that kept sketches instead of whole tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from porter.golden.format import Record, dtype_of
from porter.golden.node import Node, tensor_nodes
from porter.golden.sketch import relative_error, sketch
from porter.golden.store import Golden


def sketched_error(golden: Golden, records: Sequence[Record], parts: Sequence[Tensor]) -> float | None:
    """Relative L2 error of `parts` (one tensor per record) together, estimated to a few percent; None without tensors.

    Padding cannot be left out of a sketch: its rows count on both sides.
    """
    squared = scale = 0.0
    for record, part in zip(records, parts, strict=True):
        node = _first_floating(record.outputs)
        if node is None or math.prod(node["shape"]) != part.numel():
            return None
        known = golden.sketch(node["tensor"])
        size = part.numel() * dtype_of(node["dtype"]).itemsize
        error, _ = relative_error(sketch(part, tensor_bytes=size), known)
        if not math.isfinite(error):
            return math.inf
        squared += (error * known.norm) ** 2
        scale += known.norm**2
    return math.sqrt(squared / scale) if scale else (0.0 if not squared else math.inf)


def _first_floating(node: Node) -> Node | None:
    return next((each for each in tensor_nodes(node) if dtype_of(each["dtype"]).is_floating_point), None)
