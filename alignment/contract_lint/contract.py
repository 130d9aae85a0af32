"""What a model stores and declares: dtypes, shapes and config, of a module or of a directory's headers alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from porter.alignment.candidate import compute_dtype
from porter.alignment.contract_lint.kinds import precision
from porter.alignment.streaming import Tensors
from porter.errors import PorterError
from porter.golden.format import dtype_of
from porter.golden.store import Golden

HEADER_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Stored:
    """One parameter or buffer. `lasting`: it is part of a checkpoint, not computed at start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    lasting: bool = True


def no_values(name: str) -> Tensor | None:
    """Of a directory only headers are read."""
    return None


@dataclass(frozen=True)
class Contract:
    """What is known of one side without running it. `values` reads a tensor, None where only headers were read."""

    compute: torch.dtype
    tensors: Mapping[str, Stored]
    config: Mapping[str, Any]
    pinned: tuple[str, ...] = ()
    values: Callable[[str], Tensor | None] = no_values
    module: nn.Module | None = field(default=None, repr=False)

    def is_pinned(self, name: str) -> bool:
        """Whether the class keeps this tensor in float32 whatever the model's dtype."""
        return any(part in name for part in self.pinned)


def contract_of_module(model: nn.Module) -> Contract:
    """Parameters, buffers and config of a module, on any device; meta will do."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    lasting = set(model.state_dict())
    stored = {name: Stored(t.dtype, tuple(t.shape), name in lasting) for name, t in tensors.items()}
    config: Any = getattr(model, "config", None)
    declared = json.loads(config.to_json_string(use_diff=False)) if hasattr(config, "to_json_string") else {}
    held = Tensors(model)

    def values(name: str) -> Tensor | None:
        tensor = held.get(name)
        return None if tensor is None or tensor.is_meta else tensor

    return Contract(compute_dtype(model), stored, declared, _pinned(model), values, model)


def _pinned(model: nn.Module) -> tuple[str, ...]:
    names = [getattr(model, f"_keep_in_fp32_modules{suffix}", None) or () for suffix in ("", "_strict")]
    return tuple(dict.fromkeys(name for each in names for name in each))


def contract_of_directory(directory: Path) -> Contract:
    """config.json and the safetensors headers of a checkpoint or an exported directory; reads no weight."""
    config = _json(directory / "config.json")
    tensors: dict[str, Stored] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= _headers(file)
    if not tensors:
        raise PorterError(f"{directory}: holds no *.safetensors; give a checkpoint or a directory of `porter adapt`")
    return Contract(_most(tensors, config), tensors, config)


def contract_of_golden(golden: Golden) -> Contract:
    """What a golden declares of its source, and the dtypes of the weights that it stored or refers to."""
    described = golden.manifest["model"]
    folder = golden.path if described["weights"] else Path(described["checkpoint"] or golden.path)
    tensors: dict[str, Stored] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= _headers(file)
    dtype = dtype_of(golden.manifest["dtype"] or "float32")
    return Contract(dtype, tensors, described["config"] or {})


def _headers(file: Path) -> dict[str, Stored]:
    found = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():
                held = opened.get_slice(name)
                dtype = HEADER_DTYPES.get(str(held.get_dtype()))
                if dtype is not None:
                    found[name] = Stored(dtype, tuple(held.get_shape()))
    except Exception as error:
        raise PorterError(f"{file}: not readable as safetensors ({error})") from error
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PorterError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise PorterError(f"{path}: expected a JSON object")
    return content


def _most(tensors: Mapping[str, Stored], config: Mapping[str, Any]) -> torch.dtype:
    """The dtype that a config declares, or else the coarsest that matrices are stored in."""
    declared = config.get("dtype") or config.get("torch_dtype")
    known = getattr(torch, str(declared).removeprefix("torch."), None) if declared else None
    if isinstance(known, torch.dtype):
        return known
    matrices = [t.dtype for t in tensors.values() if t.dtype.is_floating_point and len(t.shape) > 1]
    return max(matrices, key=precision, default=torch.float32)
