"""The golden's files and the tensor index: what the writer writes and the store reads.

``header.json``     what is recorded, written before anything else
``tensors.bin``     raw little-endian elements, contiguous, each tensor starting at a multiple of 64 bytes
``tensors.jsonl``   one line per stored tensor: where it lies, its dtype, shape and digest
``records.jsonl``   one line per module call, and one line at the end of each step and of each batch
``weights-*.safetensors``  the model's parameters, where no checkpoint on disk holds them
``manifest.json``   everything of the header plus what the run produced; written last, so its presence means complete
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from porter.errors import PorterError
from porter.golden.node import Node

SCHEMA = "porter.golden/1"
DETAILS = ("full", "sketch", "stats")
HEADER, MANIFEST, RECORDS = "header.json", "manifest.json", "records.jsonl"
TENSORS, INDEX = "tensors.bin", "tensors.jsonl"
ALIGNMENT = 64


@dataclass(frozen=True)
class Record:
    """One call of one module.

    ``step`` counts calls of the root module, ``call`` the calls of this module within the step, ``batch`` the runs that
    start with an empty cache. ``inputs`` is ``{"dict": {"args": {"list": ...}, "kwargs": {"dict": ...}}}``.
    """

    step: int
    call: int
    module: str
    kind: str
    inputs: Node
    outputs: Node
    batch: int = 0


@dataclass(frozen=True)
class Stored:
    """Where one tensor (or its sketch) lies in ``tensors.bin``.

    ``digest`` is that of the stored bytes. ``sketch`` is None for a tensor stored whole; else ``shape`` is
    ``[buckets]`` and the dict holds the numel, l2 norm and seed of the tensor that was projected.
    """

    id: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    digest: str
    sketch: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """The line of ``tensors.jsonl``."""
        line = {name: getattr(self, name) for name in ("id", "dtype", "shape", "offset", "bytes", "digest")}
        return line if self.sketch is None else {**line, "sketch": self.sketch}

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> Stored:
        """Inverse of ``to_json``."""
        return cls(**{**line, "shape": tuple(line["shape"])})


def host_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes, shared with it."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Inverse of ``dtype_name``; PorterError for a name this torch does not have."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PorterError(f"the golden holds tensors of dtype {name}, which torch {torch.__version__} does not have")
    return dtype


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file so that it is there whole or not at all."""
    aside = path.with_name(f".{path.name}.writing")
    with aside.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; PorterError naming the file if it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise PorterError(f"{path}: not readable as JSON ({error}); record the golden again") from error
    if not isinstance(content, dict):
        raise PorterError(f"{path}: expected a JSON object; record the golden again")
    return content


def read_lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The JSON objects of a file of lines, and whether the file ends cleanly; a line cut off in the middle ends it."""
    lines: list[dict[str, Any]] = []
    if not path.exists():
        return lines, False
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return lines, False
            try:
                lines.append(json.loads(line))
            except (ValueError, RecursionError):
                return lines, False
    return lines, True
