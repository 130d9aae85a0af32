"""What a golden keeps of one tensor, at each level of detail, computed once for every tensor that is seen twice."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Size, Tensor

from porter.golden.format import dtype_name
from porter.golden.node import Node
from porter.golden.sketch import SEED, buckets, project
from porter.golden.statistics import statistics
from porter.golden.writer import Writer

_SAMPLES = 8


class _Seen(NamedTuple):
    """A tensor recorded before, and what tells whether it still has the same content."""

    tensor: weakref.ref[Tensor]
    version: int
    shape: Size
    stride: tuple[int, ...]
    sample: list[Any]
    node: Node


class TensorEncoder:
    """Turns tensors into nodes: stores them whole, as a sketch, or as statistics alone.

    A tensor object met again (a module's output that is the next module's input) is not read again. That it has not
    changed is taken from its version counter, which every in-place operation of torch advances, and from 8 elements
    spread over it, for kernels that write without telling torch. Where neither is possible (inference mode, memory of
    another device, strided views) the tensor is read again; equal content is then found by its digest.
    """

    def __init__(self, writer: Writer, detail: str) -> None:
        self._writer = writer
        self._keep = _KEEPERS[detail]
        self._seen: dict[int, _Seen] = {}

    def __call__(self, tensor: Tensor) -> Node:
        """The tensor's node."""
        if not _recognisable(tensor):
            return self._keep(self._writer, tensor)
        sample = _sample(tensor)
        node = self._known(tensor, tensor, sample)
        base = tensor._base
        if node is None and base is not None and _same_elements(tensor, base):
            node = self._known(base, tensor, sample)
        if node is None:
            node = self._keep(self._writer, tensor)
        self._remember(tensor, sample, node)
        return node

    def _known(self, recorded: Tensor, tensor: Tensor, sample: list[Any]) -> Node | None:
        seen = self._seen.get(id(recorded))
        if seen is None or seen.tensor() is not recorded or seen.version != tensor._version or seen.sample != sample:
            return None
        if seen.shape == tensor.shape and seen.stride == tensor.stride():
            return seen.node
        return self._reshaped(seen.node, tensor)

    def _reshaped(self, node: Node, tensor: Tensor) -> Node:
        layout = {"shape": list(tensor.shape), "stride": list(tensor.stride())}
        if not node["digest"].startswith("sha256:"):
            return {**node, **layout}
        id = self._writer.name(node["digest"], tensor.dtype, tuple(tensor.shape)).id
        return {**node, **layout, "tensor": id}

    def _remember(self, tensor: Tensor, sample: list[Any], node: Node) -> None:
        key = id(tensor)
        forget = self._seen.pop
        reference = weakref.ref(tensor, lambda _: forget(key, None))
        self._seen[key] = _Seen(reference, tensor._version, tensor.shape, tensor.stride(), sample, node)


def _recognisable(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.is_cpu and not tensor.is_inference() and tensor.numel() > 0


def _same_elements(view: Tensor, base: Tensor) -> bool:
    return base.numel() == view.numel() and base.dtype == view.dtype and base.is_contiguous()


def _sample(tensor: Tensor) -> list[Any]:
    count = min(_SAMPLES, tensor.numel())
    sample: list[Any] = tensor.as_strided((count,), (tensor.numel() // count,)).tolist()
    return sample


def _node(tensor: Tensor, id: str | None, digest: str, stats: dict[str, Any]) -> Node:
    return {
        "tensor": id,
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "digest": digest,
        "stats": stats,
    }


def _keep_whole(writer: Writer, tensor: Tensor) -> Node:
    stored = writer.store(tensor)
    return _node(tensor, stored.id, stored.digest, statistics(tensor))


def _keep_sketch(writer: Writer, tensor: Tensor) -> Node:
    size = buckets(tensor.numel() * tensor.element_size())
    if size is None or not tensor.is_floating_point():
        return _keep_whole(writer, tensor)
    stats = statistics(tensor)
    values = project(tensor, size)
    digest = _digest("sketch", tensor, stats, values)
    whole = stats["nan"] + stats["inf"] == 0
    about = {"norm": stats["l2"] if whole else None, "numel": tensor.numel(), "seed": SEED}
    return _node(tensor, writer.store(values, digest, about).id, digest, stats)


def _keep_statistics(writer: Writer, tensor: Tensor) -> Node:
    stats = statistics(tensor)
    return _node(tensor, None, _digest("stats", tensor, stats), stats)


def _digest(kind: str, tensor: Tensor, stats: dict[str, Any], values: Tensor | None = None) -> str:
    """A digest of what was computed of the tensor: equal for equal tensors, but no proof that they are equal."""
    described = repr((tensor.dtype, tensor.numel(), stats)).encode()
    content = b"" if values is None else values.cpu().numpy().tobytes()
    return f"{kind}:" + hashlib.sha256(described + content).hexdigest()[:32]


_KEEPERS: dict[str, Callable[[Writer, Tensor], Node]] = {
    "full": _keep_whole,
    "sketch": _keep_sketch,
    "stats": _keep_statistics,
}
