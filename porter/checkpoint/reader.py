"""Read a safetensors checkpoint tensor by tensor. Opening one reads headers only, so a 671B model opens in seconds."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from porter.checkpoint.header import REMEDY, TORCH_DTYPES, Header, HeaderEntry, read_header, tensor_bytes
from porter.checkpoint.shards import INDEX, check_index, find_shards
from porter.checkpoint.strict_json import listed, read_object, shown
from porter.errors import PorterError

CONFIG_LIMIT = 16_000_000
CHUNK = 1 << 22
"""Bytes read at a time while hashing."""


@dataclass(frozen=True)
class TensorInfo:
    """What the header says of one tensor: dtype as safetensors spells it, shape, the shard that holds it, its bytes."""

    dtype: str
    shape: tuple[int, ...]
    shard: str
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype that `Checkpoint.load` gives; None for one that porter does not read (F4, F6)."""
        return TORCH_DTYPES.get(self.dtype)


class Checkpoint:
    """A checked directory of safetensors weights; safe to use from several threads. Make one with `open`."""

    def __init__(self, directory: Path, files: Mapping[str, Path], headers: Mapping[str, Header]) -> None:
        self.directory = directory
        self._files = files
        self._headers = headers
        self._shard_of = {name: shard for shard, header in headers.items() for name in header.tensors}

    @staticmethod
    def open(directory: str | Path) -> Checkpoint:
        """Open model.safetensors, or the shards of model.safetensors.index.json, reading headers alone.

        Raises PorterError with one line naming the file and the tensor: pickled or missing weights, files outside the
        directory, malformed or truncated shards, and an index that disagrees with the headers.
        """
        home = Path(directory)
        try:
            files, weight_map = find_shards(home)
        except OSError as error:
            raise PorterError(
                f"{shown(str(home))}: cannot be read: {error.strerror or error}; name a directory that can be"
            ) from error
        headers = {shard: read_header(path) for shard, path in files.items()}
        if weight_map is not None:
            check_index(home / INDEX, weight_map, {shard: h.tensors for shard, h in headers.items()})
        return Checkpoint(home, files, headers)

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor, in the order of shards and of the bytes within them: reading in this order is sequential."""
        return tuple(self._shard_of)

    @property
    def shards(self) -> tuple[str, ...]:
        """File names of the shards."""
        return tuple(self._headers)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for header in self._headers.values() for entry in header.tensors.values())

    def __contains__(self, name: object) -> bool:
        return name in self._shard_of

    def __len__(self) -> int:
        return len(self._shard_of)

    def info(self, name: str) -> TensorInfo:
        """The header's facts of tensor `name`. Raises PorterError for a name that the checkpoint lacks."""
        shard, entry = self._entry(name)
        return TensorInfo(entry.dtype, entry.shape, shard, entry.nbytes)

    def load(self, name: str) -> torch.Tensor:
        """A fresh tensor with the bytes of `name`, on the CPU. Needs memory for that tensor and nothing else.

        Copied, not mapped: pages of a mapped file count as resident until evicted, and a file that shrinks while
        mapped kills the process.
        """
        shard, entry = self._entry(name)
        dtype = TORCH_DTYPES.get(entry.dtype)
        if dtype is None:
            raise PorterError(
                f"{self._files[shard]}: tensor {shown(name)}: {entry.dtype} packs elements below a byte, which porter "
                f"does not read; convert the checkpoint to one of {', '.join(TORCH_DTYPES)}"
            )
        buffer = torch.empty(entry.nbytes, dtype=torch.uint8)
        self._fill(self._files[shard], entry, tensor_bytes(buffer))
        return buffer.view(dtype).reshape(entry.shape)

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json, parsed. Raises PorterError where it is missing, no JSON object, or names a key twice."""
        remedy = "copy the model's config.json beside its weights"
        return read_object(self.directory / "config.json", remedy, CONFIG_LIMIT, constants=True)

    def digests(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Shard file name -> SHA-256 of the whole file, in hex, as Hub pages show it.

        Reads every byte of the shards that hold the tensors `names` (all, if None); `fingerprint` reads none.
        """
        shards = self.shards if names is None else sorted({self._entry(name)[0] for name in names})
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            return dict(zip(shards, pool.map(lambda shard: _sha256(self._files[shard]), shards), strict=True))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the headers, sizes and modification times of the shards: tells another checkpoint, or an edited
        one, from this one without reading weights. Not proof against an edit that restores the time."""
        digest = hashlib.sha256()
        for shard, header in self._headers.items():
            digest.update(f"{shard}\0{header.file_bytes}\0{self._files[shard].stat().st_mtime_ns}\0".encode())
            digest.update(header.raw)
        return digest.hexdigest()

    def _entry(self, name: str) -> tuple[str, HeaderEntry]:
        shard = self._shard_of.get(name)
        if shard is None:
            raise PorterError(
                f"{self.directory}: has no tensor {shown(name)}; it has {listed(list(self.names)) or 'none'}"
            )
        return shard, self._headers[shard].tensors[name]

    @staticmethod
    def _fill(path: Path, entry: HeaderEntry, view: memoryview) -> None:
        done = 0
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(entry.begin)
                while done < entry.nbytes:
                    count = file.readinto(view[done:])
                    if not count:
                        raise PorterError(
                            f"{path}: tensor {shown(entry.name)}: the file became shorter while it was read; {REMEDY}"
                        )
                    done += count
        except OSError as error:
            raise PorterError(
                f"{path}: tensor {shown(entry.name)}: cannot be read: {error.strerror or error}; {REMEDY}"
            ) from error


def _sha256(path: Path) -> str:
    digest, buffer = hashlib.sha256(), bytearray(CHUNK)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
    except OSError as error:
        raise PorterError(f"{path}: cannot be read: {error.strerror or error}; {REMEDY}") from error
    return digest.hexdigest()
