"""Reading a golden: its manifest, its records in execution order, and the tensors, sketches and weights they name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from porter.errors import PorterError
from porter.golden.digest import content_digest
from porter.golden.format import (
    HEADER,
    INDEX,
    MANIFEST,
    RECORDS,
    SCHEMA,
    TENSORS,
    Record,
    Stored,
    dtype_of,
    host_bytes,
    read_json,
)
from porter.golden.node import Node, decode, tensor_nodes
from porter.golden.schema import check_manifest, read_records, read_stored
from porter.golden.sketch import Sketch, sketch

_RECORD_FIELDS = tuple(field.name for field in fields(Record))


@dataclass(frozen=True)
class Batch:
    """One run that starts with an empty cache: prefill at ``first_step``, then ``steps - 1`` decode steps.

    ``tokens`` and ``attention_mask`` [batch, sequence] int64 are the root's inputs at prefill, None where the root was
    called with something else. ``generated`` [batch, steps]: the greedy token of every step, None without logits.
    """

    first_step: int
    steps: int
    tokens: Tensor | None
    attention_mask: Tensor | None
    generated: Tensor | None


class Golden:
    """A recorded run. Open with ``Golden.open(path)``; reading is lazy and thread-safe."""

    def __init__(self, path: Path, manifest: dict[str, Any], records: list[Record], index: dict[str, Stored]) -> None:
        self.path = path
        self.manifest = manifest
        self.records = records
        self._index = index

    def __repr__(self) -> str:
        state = "complete" if self.complete else "incomplete"
        return f"Golden({str(self.path)!r}, {len(self.records)} records, {self.steps} steps, {self.detail}, {state})"

    @classmethod
    def open(cls, path: str | Path) -> Golden:
        """Open a golden directory.

        A recording that was cut off opens with the steps and records that were complete; ``complete`` is then False and
        ``manifest["incomplete"]`` says where it stopped. PorterError if nothing usable was recorded.
        """
        path = Path(path)
        complete = (path / MANIFEST).exists()
        if not complete and not (path / HEADER).exists():
            raise PorterError(f"{path}: not a golden (no {MANIFEST}); record one with `porter golden capture`")
        manifest = read_json(path / (MANIFEST if complete else HEADER))
        if manifest.get("schema") != SCHEMA:
            raise PorterError(f"{path}/{MANIFEST}: schema is {manifest.get('schema')!r}, expected {SCHEMA!r}")
        check_manifest(manifest, complete, str(path / (MANIFEST if complete else HEADER)))
        index = _read_index(path)
        records, ends, whole = _read_records(path, index)
        if complete and (not whole or len(records) != manifest.get("records")):
            raise PorterError(
                f"{path}: {RECORDS} or {TENSORS} is damaged after {len(records)} records; record it again"
            )
        if not records:
            raise PorterError(f"{path}: the recording stopped before its first record; record it again")
        if not complete:
            manifest |= summary(ends) | {"complete": False, "records": len(records)}
            manifest["incomplete"] = _where_it_stopped(records, ends)
        return cls(path, manifest, records, index)

    @property
    def complete(self) -> bool:
        """False for a recording that was cut off."""
        return bool(self.manifest["complete"])

    @property
    def detail(self) -> str:
        """``full``, ``sketch`` or ``stats``."""
        return str(self.manifest["detail"])

    @property
    def steps(self) -> int:
        """How many calls of the root module were recorded to their end."""
        return int(self.manifest["steps"])

    @property
    def generated(self) -> list[list[int] | None]:
        """Per step, the argmax of every row's logits at the last position; None for a root without logits."""
        return [tokens for batch in self.manifest["batches"] for tokens in batch["generated"]]

    @cached_property
    def batches(self) -> list[Batch]:
        """The runs that start with an empty cache, in order."""
        return [_batch(entry) for entry in self.manifest["batches"]]

    def tensor(self, id: str) -> Tensor:
        """A stored tensor, contiguous, on the CPU, freshly read: the caller may change it."""
        stored = self._stored(id)
        if stored.sketch is not None:
            raise PorterError(
                f"{self.path}: {id} was recorded as a sketch; record with --detail full for whole tensors"
            )
        return self._read(stored)

    def sketch(self, id: str) -> Sketch:
        """The sketch of a stored tensor; of one stored whole it is computed."""
        stored = self._stored(id)
        values = self._read(stored)
        if stored.sketch is None:
            return sketch(values)
        norm = stored.sketch["norm"]
        about = {**stored.sketch, "norm": math.nan if norm is None else norm}
        return Sketch(values, **about)

    def value(self, node: Node, cache: Any = None) -> Any:
        """The Python value of a node: tensors with their recorded strides, caches replaced by ``cache``."""
        return decode(node, self._decode_tensor, cache)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The source model's parameters, one at a time.

        Those stored in the golden come under the model's own names, tied ones under each of their names; those of a
        checkpoint come under the names and in the dtype of the checkpoint. PorterError if there are neither.
        """
        from porter.golden.weights import read_weights

        return read_weights(self.path, self.manifest["model"])

    def _stored(self, id: str) -> Stored:
        if id not in self._index:
            reason = "recorded as statistics alone" if self.detail == "stats" else f"not in {INDEX}"
            raise PorterError(f"{self.path}: tensor {id} is {reason}; record with --detail full for whole tensors")
        return self._index[id]

    def _read(self, stored: Stored) -> Tensor:
        buffer = torch.empty(stored.bytes, dtype=torch.uint8)
        if stored.bytes:
            with (self.path / TENSORS).open("rb") as file:
                file.seek(stored.offset)
                if file.readinto(host_bytes(buffer)) != stored.bytes:
                    raise PorterError(f"{self.path}/{TENSORS}: ends inside tensor {stored.id}; record the golden again")
        if content_digest(buffer) != stored.digest:
            raise PorterError(f"{self.path}/{TENSORS}: tensor {stored.id} was changed; record the golden again")
        return buffer.view(dtype_of(stored.dtype)).view(stored.shape)

    def _decode_tensor(self, node: Node) -> Tensor:
        if node["tensor"] is None:
            raise PorterError(f"{self.path}: recorded as statistics alone; record with --detail full to replay")
        return with_stride(self.tensor(node["tensor"]), tuple(node["stride"]))


def with_stride(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A tensor of the same elements laid out with ``stride``, where no two elements share memory other than by a
    broadcast dimension (stride 0); else the tensor as it is."""
    if tensor.stride() == stride or tensor.numel() == 0:
        return tensor
    dims = sorted((step, size) for step, size in zip(stride, tensor.shape, strict=True) if step and size > 1)
    span = 1
    for step, size in dims:
        if step < span:
            return tensor
        span += step * (size - 1)
    once = tensor[tuple(slice(1) if step == 0 else slice(None) for step in stride)]
    laid_out = torch.empty_strided(once.shape, stride, dtype=tensor.dtype).copy_(once)
    return laid_out.expand(tensor.shape)


def summary(ends: list[dict[str, Any]]) -> dict[str, Any]:
    """The manifest's account of the run, from the lines that end its steps: batches start where the cache was empty."""
    batches: list[dict[str, Any]] = []
    for end in ends:
        if end["past_length"] == 0 or not batches:
            start = {"first_step": end["step"], "tokens": end["tokens"], "attention_mask": end["attention_mask"]}
            batches.append({**start, "steps": 0, "generated": []})
        batches[-1]["steps"] += 1
        batches[-1]["generated"].append(end["generated"])
    rows = [batch[name] for name in ("tokens", "attention_mask") for batch in batches]
    tokens, masks = rows[: len(batches)], rows[len(batches) :]
    return {
        "steps": len(ends),
        "batches": batches,
        "tokens": [row for batch in tokens for row in batch] if tokens and None not in tokens else None,
        "attention_mask": [row for batch in masks for row in batch] if masks and None not in masks else None,
    }


def _batch(entry: dict[str, Any]) -> Batch:
    def rows(content: list[Any] | None) -> Tensor | None:
        return None if content is None else torch.tensor(content, dtype=torch.int64)

    generated = (
        None if None in entry["generated"] else torch.tensor(entry["generated"], dtype=torch.int64).T.contiguous()
    )
    return Batch(entry["first_step"], entry["steps"], rows(entry["tokens"]), rows(entry["attention_mask"]), generated)


def _read_index(path: Path) -> dict[str, Stored]:
    size = (path / TENSORS).stat().st_size if (path / TENSORS).exists() else 0
    return {entry.id: entry for entry in read_stored(path / INDEX) if entry.offset + entry.bytes <= size}


def _read_records(path: Path, index: dict[str, Stored]) -> tuple[list[Record], list[dict[str, Any]], bool]:
    """The records and step ends up to the first line that is cut off or names a tensor that is not there."""
    lines, whole = read_records(path / RECORDS)
    records: list[Record] = []
    ends: list[dict[str, Any]] = []
    for line in lines:
        if "end" in line:
            ends += [line] if line["end"] == "step" else []
            continue
        nodes = [*tensor_nodes(line["inputs"]), *tensor_nodes(line["outputs"])]
        if any(node["tensor"] is not None and node["tensor"] not in index for node in nodes):
            return records, ends, False
        records.append(Record(**{name: line[name] for name in _RECORD_FIELDS}))
    return records, ends, whole


def _where_it_stopped(records: list[Record], ends: list[dict[str, Any]]) -> str:
    last = records[-1]
    if last.step < len(ends):
        return f"the recording stopped after {len(ends)} whole steps"
    return f"the recording stopped in step {last.step}, after the module {last.module!r}"
