"""What a golden keeps of one tensor, at each level of detail, measured once for every content that is seen twice."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from porter.golden.digest import digest_of, fingerprint
from porter.golden.format import dtype_name
from porter.golden.node import JsonText, quoted
from porter.golden.one_pass import Measured, one_pass
from porter.golden.sketch import SEED, buckets, norm_of, project
from porter.golden.statistics import statistics, statistics_of
from porter.golden.writer import Writer, host_tensor


class _Kept(NamedTuple):
    id: str | None
    digest: str
    stats: dict[str, Any]


class TensorEncoder:
    """Turns tensors into nodes, as JSON: stores them whole, as a sketch, or as statistics alone.

    Every tensor on the CPU is read whole and fingerprinted whenever it passes a module: what was changed in place in
    between shows, with or without torch's knowledge. Only contents that are new within a step are stored. Of a tensor
    on a device statistics and sketches are taken there, without a copy to the host; its digest is then one of these:
    equal for equal tensors, but no proof that they are equal.
    """

    def __init__(self, writer: Writer, detail: str) -> None:
        self._writer = writer
        self._detail = detail
        self._keep = _KEEPERS[detail]
        self._met: set[int] = set()
        self._known: dict[tuple[Any, ...], JsonText] = {}

    def forget(self) -> None:
        """Let go of the contents met so far: those of a long run would fill the memory."""
        self._met.clear()
        self._known.clear()

    def __call__(self, tensor: Tensor) -> JsonText:
        """The tensor's node."""
        if not (tensor.is_cpu or self._detail == "full"):
            return _node(tensor, self._keep(self._writer, tensor, None, None))
        content = host_tensor(tensor)
        measured = None
        # An object met before is likely to be unchanged, and a fingerprint is cheaper than all measures.
        if id(tensor) not in self._met:
            self._met.add(id(tensor))
            measured = one_pass(content, *self._sketched(content))
        words = fingerprint(content) if measured is None else measured.words
        key = words, tensor.dtype, tensor.shape, tensor.stride()
        node = self._known.get(key)
        if node is None:
            kept = self._keep(self._writer, content, digest_of(words, content.nbytes), measured)
            node = self._known[key] = _node(tensor, kept)
        return node

    def _sketched(self, tensor: Tensor) -> tuple[int, int]:
        return (buckets(tensor.nbytes) or 0, SEED) if self._detail == "sketch" else (0, 0)


def _node(tensor: Tensor, kept: _Kept) -> JsonText:
    stats = ", ".join([f'"{name}": {"null" if value is None else repr(value)}' for name, value in kept.stats.items()])
    return (
        f'{{"tensor": {quoted(kept.id)}, "dtype": "{dtype_name(tensor.dtype)}", "shape": {list(tensor.shape)}, '
        f'"stride": {list(tensor.stride())}, "digest": "{kept.digest}", "stats": {{{stats}}}}}'
    )


def _keep_whole(writer: Writer, tensor: Tensor, digest: str | None, measured: Measured | None) -> _Kept:
    stored = writer.store(tensor, digest)
    return _Kept(stored.id, stored.digest, _statistics(tensor, measured))


def _keep_sketch(writer: Writer, tensor: Tensor, digest: str | None, measured: Measured | None) -> _Kept:
    size = buckets(tensor.nbytes)
    if size is None or not tensor.is_floating_point():
        return _keep_whole(writer, tensor, digest, measured)
    stats = _statistics(tensor, measured)
    values = project(tensor, size) if measured is None else measured.sums
    norm = norm_of(stats)
    about = {"norm": None if math.isnan(norm) else norm, "numel": tensor.numel(), "seed": SEED}
    return _Kept(writer.store(values, None, about).id, digest or _digest("sketch", tensor, stats, values), stats)


def _keep_statistics(writer: Writer, tensor: Tensor, digest: str | None, measured: Measured | None) -> _Kept:
    stats = _statistics(tensor, measured)
    return _Kept(None, digest or _digest("stats", tensor, stats), stats)


def _statistics(tensor: Tensor, measured: Measured | None) -> dict[str, Any]:
    return statistics(tensor) if measured is None else statistics_of(measured.moments, tensor)


def _digest(kind: str, tensor: Tensor, stats: dict[str, Any], values: Tensor | None = None) -> str:
    """A digest of what was computed of the tensor."""
    described = repr((tensor.dtype, tensor.numel(), stats)).encode()
    content = b"" if values is None else values.cpu().numpy().tobytes()
    return f"{kind}:" + hashlib.sha256(described + content).hexdigest()[:32]


_KEEPERS: dict[str, Callable[[Writer, Tensor, str | None, Measured | None], _Kept]] = {
    "full": _keep_whole,
    "sketch": _keep_sketch,
    "stats": _keep_statistics,
}
