"""Safetensors files built byte by byte, so that tests can build wrong ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def raw_file(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """Write `header` (bytes, or an object to dump) and `data`; `length` overrides the true header length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    """The header fields of one tensor; by default a right one."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def sharded(directory: Path, shards: dict[str, dict[str, torch.Tensor]]) -> Path:
    """A checkpoint of several shards with a right index."""
    directory.mkdir(parents=True, exist_ok=True)
    for file, tensors in shards.items():
        save_file(tensors, directory / file)
    write_index(directory, {name: file for file, tensors in shards.items() for name in tensors})
    return directory


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def single(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of one file."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    return directory
