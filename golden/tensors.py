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
from porter.golden.node import Node
from porter.golden.sketch import SEED, buckets, norm_of, statistics_and_sums
from porter.golden.statistics import statistics
from porter.golden.writer import Writer, host_tensor


class _Kept(NamedTuple):
    id: str | None
    digest: str
    stats: dict[str, Any]


class TensorEncoder:
    """Turns tensors into nodes: stores them whole, as a sketch, or as statistics alone.

    Every tensor on the CPU is read whole and fingerprinted whenever it passes a module: what was changed in place in
    between shows, with or without torch's knowledge. Only contents that are new within a step are measured. Of a tensor
    on a device statistics and sketches are taken there, without a copy to the host; its digest is then one of these:
    equal for equal tensors, but no proof that they are equal.
    """

    def __init__(self, writer: Writer, detail: str) -> None:
        self._writer = writer
        self._keep = _KEEPERS[detail]
        self._on_host = detail == "full"
        self._known: dict[tuple[bytes, torch.dtype, torch.Size], _Kept] = {}

    def forget(self) -> None:
        """Let go of the contents met so far: those of a long run would fill the memory."""
        self._known.clear()

    def __call__(self, tensor: Tensor) -> Node:
        """The tensor's node."""
        if not (tensor.is_cpu or self._on_host):
            return _node(tensor, self._keep(self._writer, tensor, None))
        content = host_tensor(tensor)
        words = fingerprint(content)
        key = words, tensor.dtype, tensor.shape
        kept = self._known.get(key)
        if kept is None:
            kept = self._known[key] = self._keep(self._writer, content, digest_of(words, content.nbytes))
        return _node(tensor, kept)


def _node(tensor: Tensor, kept: _Kept) -> Node:
    return {
        "tensor": kept.id,
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "digest": kept.digest,
        "stats": kept.stats,
    }


def _keep_whole(writer: Writer, tensor: Tensor, digest: str | None) -> _Kept:
    stored = writer.store(tensor, digest)
    return _Kept(stored.id, stored.digest, statistics(tensor))


def _keep_sketch(writer: Writer, tensor: Tensor, digest: str | None) -> _Kept:
    size = buckets(tensor.nbytes)
    if size is None or not tensor.is_floating_point():
        return _keep_whole(writer, tensor, digest)
    stats, values = statistics_and_sums(tensor, size)
    norm = norm_of(stats)
    about = {"norm": None if math.isnan(norm) else norm, "numel": tensor.numel(), "seed": SEED}
    return _Kept(writer.store(values, None, about).id, digest or _digest("sketch", tensor, stats, values), stats)


def _keep_statistics(writer: Writer, tensor: Tensor, digest: str | None) -> _Kept:
    stats = statistics(tensor)
    return _Kept(None, digest or _digest("stats", tensor, stats), stats)


def _digest(kind: str, tensor: Tensor, stats: dict[str, Any], values: Tensor | None = None) -> str:
    """A digest of what was computed of the tensor."""
    described = repr((tensor.dtype, tensor.numel(), stats)).encode()
    content = b"" if values is None else values.cpu().numpy().tobytes()
    return f"{kind}:" + hashlib.sha256(described + content).hexdigest()[:32]


_KEEPERS: dict[str, Callable[[Writer, Tensor, str | None], _Kept]] = {
    "full": _keep_whole,
    "sketch": _keep_sketch,
    "stats": _keep_statistics,
}
