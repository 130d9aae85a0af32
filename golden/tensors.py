"""What a golden keeps of one tensor, at each level of detail, measured once for every content that is seen twice.

Between two modules the processor's caches are the model's, and every line of Python costs many times what it does in a
loop. So when a tensor passes, only what must happen at once happens: it is read, and written where it is kept whole. It
then stands as a number between two NULs, which JSON never holds, until `resolved` puts its node there.
"""

from __future__ import annotations

import hashlib
import math
from ctypes import Array, c_float
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Size, Tensor, dtype

from porter.golden.digest import digest_of, fingerprint
from porter.golden.format import dtype_name
from porter.golden.node import JsonText, quoted
from porter.golden.one_pass import Moments, one_pass
from porter.golden.sketch import SEED, buckets, norm_of, project
from porter.golden.statistics import of_moments, statistics, tells
from porter.golden.writer import Writer, host_tensor


class _Seen(NamedTuple):
    """What is known of a content in one layout. ``print``: its fingerprint, or its digest where that was computed on a
    device. ``sums``: of its sketch. ``whole``: its bytes are in the golden."""

    dtype: dtype
    shape: Size
    stride: tuple[int, ...]
    print: bytes | str
    stats: Moments | dict[str, Any]
    sums: Tensor | Array[c_float] | None
    whole: bool


class TensorEncoder:
    """Turns tensors into nodes: stores them whole, as a sketch, or as statistics alone.

    Every tensor on the CPU is read whole and fingerprinted whenever it passes a module: what was changed in place in
    between shows, with or without torch's knowledge. Only contents that are new within a step are stored. Of a tensor
    on a device statistics and sketches are taken there, without a copy to the host; its digest is then one of these:
    equal for equal tensors, but no proof that they are equal.
    """

    def __init__(self, writer: Writer, detail: str) -> None:
        self._writer = writer
        self._detail = detail
        self._met: dict[int, ref[Tensor]] = {}
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._new: list[_Seen] = []
        self._nodes: list[JsonText] = []

    def __call__(self, tensor: Tensor) -> str:
        """What stands for the tensor's node until it is resolved."""
        if not (tensor.is_cpu or self._detail == "full"):
            return self._numbered(self._seen_on_device(tensor))
        content, size = host_tensor(tensor), self._buckets(tensor)
        met = self._met.get(id(tensor))
        # An object met before is likely to be unchanged, and a fingerprint is cheaper than all measures.
        known = met is not None and met() is tensor
        if not known:
            self._met[id(tensor)] = ref(tensor)
        measured = None if known else one_pass(content, size, SEED)
        words = fingerprint(content) if measured is None else measured.words
        key = words, tensor.dtype, tensor.shape, tensor.stride()
        number = self._numbers.get(key)
        if number is not None:
            return f"\0{number}\0"
        self._numbers[key] = len(self._nodes) + len(self._new)
        whole = not size and self._detail != "stats"
        if whole:
            self._writer.write(content, digest_of(words, content.nbytes))
        if known:
            measured = one_pass(content, size, SEED)
        told = measured is not None and tells(measured.moments, content.numel())
        stats = measured.moments if measured is not None and told else statistics(content)
        sums = None if not size else project(content, size) if measured is None else measured.sums
        return self._numbered(_Seen(*key[1:], words, stats, sums, whole))

    def resolved(self, text: str) -> JsonText:
        """The text with the nodes of its tensors."""
        self._nodes += [self._node(seen) for seen in self._new]
        self._new.clear()
        parts = text.split("\0")
        parts[1::2] = [self._nodes[int(number)] for number in parts[1::2]]
        return "".join(parts)

    def forget(self) -> None:
        """Let go of the contents met so far: those of a long run would fill the memory. What stood for them is void."""
        for held in (self._met, self._numbers, self._new, self._nodes):
            held.clear()

    def _numbered(self, seen: _Seen) -> str:
        self._new.append(seen)
        return f"\0{len(self._nodes) + len(self._new) - 1}\0"

    def _buckets(self, tensor: Tensor) -> int:
        """The size of the tensor's sketch; 0 if it gets none."""
        return buckets(tensor.nbytes) or 0 if self._detail == "sketch" and tensor.is_floating_point() else 0

    def _seen_on_device(self, tensor: Tensor) -> _Seen:
        stats, size = statistics(tensor), self._buckets(tensor)
        layout = tensor.dtype, tensor.shape, tensor.stride()
        if self._detail == "sketch" and not size:
            content = host_tensor(tensor)
            digest = digest_of(fingerprint(content), content.nbytes)
            self._writer.write(content, digest)
            return _Seen(*layout, digest, stats, None, True)
        sums = project(tensor, size).cpu() if size else None
        return _Seen(*layout, _digest(self._detail, tensor, stats, sums), stats, sums, False)

    def _node(self, seen: _Seen) -> JsonText:
        id, numel = None, seen.shape.numel()
        digest = seen.print if isinstance(seen.print, str) else digest_of(seen.print, numel * seen.dtype.itemsize)
        stats = of_moments(seen.stats, numel) if isinstance(seen.stats, Moments) else seen.stats
        if seen.whole:
            id = self._writer.entry(digest, seen.dtype, seen.shape).id
        elif seen.sums is not None:
            norm = norm_of(stats)
            about = {"norm": None if math.isnan(norm) else norm, "numel": numel, "seed": SEED}
            sums = seen.sums if isinstance(seen.sums, Tensor) else torch.frombuffer(seen.sums, dtype=torch.float32)
            id = self._writer.store(sums, about).id
        told = ", ".join([f'"{name}": {"null" if value is None else repr(value)}' for name, value in stats.items()])
        return (
            f'{{"tensor": {quoted(id)}, "dtype": "{dtype_name(seen.dtype)}", "shape": {list(seen.shape)}, '
            f'"stride": {list(seen.stride)}, "digest": "{digest}", "stats": {{{told}}}}}'
        )


def _digest(kind: str, tensor: Tensor, stats: dict[str, Any], sums: Tensor | None) -> str:
    """A digest of what was computed of the tensor."""
    described = repr((tensor.dtype, tensor.numel(), stats)).encode()
    content = b"" if sums is None else sums.numpy().tobytes()
    return f"{kind}:" + hashlib.sha256(described + content).hexdigest()[:32]
