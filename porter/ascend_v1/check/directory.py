"""An AscendV1 directory as it stands: description, config and the headers of its weights, believed in nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from porter.ascend_v1.names import DESCRIPTION, FIELDS
from porter.ascend_v1.original import Original
from porter.ascend_v1.quant_type import FLOAT, TYPES, Linear
from porter.ascend_v1.source import dtype_said
from porter.checkpoint.header import Header, read_header
from porter.checkpoint.reader import CONFIG_LIMIT, Checkpoint
from porter.checkpoint.shards import shard_path
from porter.checkpoint.strict_json import read_object, shown
from porter.errors import PorterError

DESCRIPTION_LIMIT = 400_000_000
"""Bytes; DeepSeek-V3's, with some 140,000 entries, has about 12 MB."""

REMEDY = "write the directory again, or give one that holds what --quantization ascend loads"


@dataclass(frozen=True)
class AscendDirectory:
    """`types` are the description's entries of tensors, `fields` its others; `repeated` are tensors that a second file
    holds too. `original` is None where porter cannot tell the model's names, and `unknown` says why; `unbuildable`
    where that is config.json's fault."""

    path: Path
    types: Mapping[str, str]
    fields: Mapping[str, Any]
    config: Mapping[str, Any]
    weights: Checkpoint
    repeated: Mapping[str, str]
    original: Original | None = None
    unknown: str = ""
    unbuildable: bool = False

    @property
    def model_type(self) -> str:
        """The model_type of config.json, by which vllm-ascend finds the fused layers."""
        return str(self.config.get("model_type", ""))

    @property
    def model_dtype(self) -> torch.dtype:
        """What vLLM loads the model in by its config: bfloat16 for none and for float32."""
        said = dtype_said(self.config)
        return said if said == torch.float16 else torch.bfloat16

    @cached_property
    def described(self) -> dict[str, str]:
        """Linear or embedding (without ".weight") -> its type."""
        return {n.removesuffix(".weight"): kind for n, kind in self.types.items() if n.endswith(".weight")}

    @cached_property
    def quantized(self) -> dict[str, Linear]:
        """The linears of a type that porter knows, with the sizes that config calls for, else those that are stored."""
        found = {}
        for name, kind in self.described.items():
            if kind == FLOAT or kind not in TYPES or f"{name}.weight" not in self.weights:
                continue
            known = self.original.linears.get(name) if self.original is not None else None
            linear = known or self._as_stored(name, kind)
            if linear is not None:
                found[name] = linear
        return found

    def file_of(self, tensor: str) -> str:
        """The file that holds a tensor, or the description."""
        return self.weights.info(tensor).shard if tensor in self.weights else DESCRIPTION

    def _as_stored(self, name: str, kind: str) -> Linear | None:
        shape = self.weights.info(f"{name}.weight").shape
        if len(shape) != 2:
            return None
        expert = ".experts." in name
        role = "expert" if expert else "attention" if "attn" in name else "mlp"
        rows = shape[0] * 2 if TYPES[kind].packed else shape[0]
        return Linear(name, rows, shape[1], role, f"{name}.bias" in self.weights)  # type: ignore[arg-type]


def open_directory(path: Path) -> AscendDirectory:
    """Read description, config and headers. Raises PorterError for anything that is no AscendV1 directory."""
    if not path.is_dir():
        raise PorterError(f"--check {path}: is not a directory; {REMEDY}")
    if not (path / DESCRIPTION).is_file():
        raise PorterError(f"{path}: has no {DESCRIPTION}: this is no AscendV1 directory; {REMEDY}")
    content = read_object(path / DESCRIPTION, REMEDY, DESCRIPTION_LIMIT)
    fields = {key: value for key, value in content.items() if key in FIELDS or not isinstance(value, str)}
    types = {key: value for key, value in content.items() if key not in fields}
    config = read_object(path / "config.json", REMEDY, CONFIG_LIMIT, constants=True)
    weights, repeated = _weights(path)
    return AscendDirectory(path, types, fields, config, weights, repeated)


def _weights(path: Path) -> tuple[Checkpoint, dict[str, str]]:
    """Every *.safetensors file of the directory, as vLLM finds them, and the tensors that more than one holds."""
    names = sorted(file.name for file in path.glob("*.safetensors"))
    if not names:
        raise PorterError(f"{path}: has no *.safetensors file; {REMEDY}")
    files = {name: shard_path(path, name, path) for name in names}
    headers: dict[str, Header] = {name: read_header(file) for name, file in files.items()}
    seen: dict[str, str] = {}
    repeated = {}
    for name, header in headers.items():
        for tensor in header.tensors:
            if tensor in seen:
                repeated[tensor] = f"{shown(seen[tensor])} and {shown(name)}"
            seen[tensor] = name
    return Checkpoint(path, files, headers), repeated
