"""Where every byte of a checkpoint goes, decided before the first is written."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from porter.checkpoint.header import BITS, HEADER_LIMIT, SAFETENSORS_DTYPES
from porter.checkpoint.shards import STEM, index_name, single_name
from porter.checkpoint.strict_json import shown
from porter.errors import PorterError

ALIGNMENT = 8
"""Headers are padded to it, and wider elements come first in a shard, so each tensor lies aligned for its dtype."""


@dataclass(frozen=True)
class TensorPlan:
    """One tensor to write: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * BITS[SAFETENSORS_DTYPES[self.dtype]] // 8


@dataclass(frozen=True)
class Place:
    """Where a tensor goes: the file name of its shard and its first byte there, counted from the file's start."""

    plan: TensorPlan
    shard: str
    offset: int


@dataclass(frozen=True)
class Shard:
    """One file: its name, its header with the 8 bytes of length before it, and its size in bytes."""

    name: str
    header: bytes
    size: int


@dataclass(frozen=True)
class Layout:
    """All shards and the place of every tensor. Depends on the plan alone, so equal plans give equal bytes."""

    shards: tuple[Shard, ...]
    places: Mapping[str, Place]
    index: str = index_name(STEM)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, headers not counted: the index's total_size."""
        return sum(place.plan.nbytes for place in self.places.values())

    def digest(self) -> str:
        """SHA-256 of the headers and file names: two layouts with the same digest hold the same tensors alike."""
        digest = hashlib.sha256()
        for shard in self.shards:
            digest.update(shard.name.encode() + b"\0" + shard.header)
        return digest.hexdigest()


def plan_layout(
    plan: Sequence[TensorPlan], shard_bytes: int, metadata: Mapping[str, str], stem: str = STEM
) -> Layout:
    """Fill shards of at most `shard_bytes` of tensors in the order of `plan`; a larger tensor gets a shard of its own.

    File names begin with `stem`.

    Raises PorterError for a name planned twice, a dtype that safetensors lacks, or an impossible shape.
    """
    seen: set[str] = set()
    for item in plan:
        _check_plan(item, seen)
        seen.add(item.name)
    groups: list[list[TensorPlan]] = []
    room = 0
    for item in plan:
        if not groups or (item.nbytes > room and groups[-1]):
            groups.append([])
            room = shard_bytes
        groups[-1].append(item)
        room -= item.nbytes
    shards, places = [], {}
    for number, group in enumerate(groups or [[]], start=1):
        name = single_name(stem) if len(groups) <= 1 else f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors"
        shard, offsets = _lay_out(name, group, metadata)
        shards.append(shard)
        places.update({item.name: Place(item, name, offsets[item.name]) for item in group})
    return Layout(tuple(shards), {item.name: places[item.name] for item in plan}, index_name(stem))


def _check_plan(item: TensorPlan, seen: set[str]) -> None:
    at = f"planned tensor {shown(item.name)}"
    if item.name in seen or item.name == "__metadata__":
        raise PorterError(f"{at}: {'is planned twice' if item.name in seen else 'is a reserved name'}; rename it")
    if not item.name or not item.name.isprintable():
        raise PorterError(f"{at}: a tensor name must be printable text; rename it")
    if item.dtype not in SAFETENSORS_DTYPES:
        choices = ", ".join(str(dtype).removeprefix("torch.") for dtype in SAFETENSORS_DTYPES)
        raise PorterError(f"{at}: {item.dtype} has no place in safetensors; expected one of {choices}")
    if any(type(size) is not int or size < 0 for size in item.shape):
        raise PorterError(f"{at}: shape {item.shape} must be non-negative integers")


def _lay_out(name: str, group: Sequence[TensorPlan], metadata: Mapping[str, str]) -> tuple[Shard, dict[str, int]]:
    ordered = sorted(group, key=lambda item: -BITS[SAFETENSORS_DTYPES[item.dtype]])
    fields: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begin, offsets = 0, {}
    for item in ordered:
        end = begin + item.nbytes
        fields[item.name] = {
            "dtype": SAFETENSORS_DTYPES[item.dtype],
            "shape": list(item.shape),
            "data_offsets": [begin, end],
        }
        offsets[item.name] = begin
        begin = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > HEADER_LIMIT:
        raise PorterError(f"{name}: header of {len(text)} bytes is above the limit {HEADER_LIMIT}; use smaller shards")
    header = struct.pack("<Q", len(text)) + text
    return Shard(name, header, len(header) + begin), {n: len(header) + offset for n, offset in offsets.items()}
