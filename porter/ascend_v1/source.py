"""The config.json of a checkpoint: how it is stored, and as it is written beside AscendV1 weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from porter.checkpoint.reader import CONFIG_LIMIT
from porter.checkpoint.strict_json import read_object
from porter.errors import PorterError

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def config_of(home: Path, config: Any) -> dict[str, Any]:
    """config.json beside the weights as it stands there, else what the model's own config says."""
    if (home / "config.json").is_file():
        return read_object(home / "config.json", "save it again with save_pretrained", CONFIG_LIMIT, constants=True)
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return fields


def dtype_said(fields: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype of a config.json, of its text_config where the top says none."""
    text = fields.get("text_config")
    for place in (fields, text if isinstance(text, Mapping) else {}):
        said = place.get("dtype", place.get("torch_dtype"))
        found = getattr(torch, said, None) if isinstance(said, str) else None
        if isinstance(found, torch.dtype):
            return found
    return None


def written_dtype(fields: Mapping[str, Any], wanted: str | None) -> tuple[torch.dtype, bool]:
    """(the dtype that vLLM loads the written model in, whether float32 weights become that)."""
    if wanted is not None and wanted not in DTYPES:
        raise PorterError(f"--dtype {wanted}: AscendV1 is loaded in {' or '.join(DTYPES)}")
    said = dtype_said(fields) or torch.float32
    if wanted is not None:
        return DTYPES[wanted], DTYPES[wanted] != said
    return (said, False) if said in (torch.bfloat16, torch.float16) else (torch.bfloat16, True)


def written_config(fields: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """config.json without quantization_config, which would make vLLM choose another loader, in the written dtype."""
    name = str(dtype).removeprefix("torch.")
    result = {key: value for key, value in fields.items() if key not in ("quantization_config", "torch_dtype", "dtype")}
    result["torch_dtype" if "torch_dtype" in fields else "dtype"] = name
    if result.get("model_type") in CONFIG_MAPPING:
        # Its code is not copied, and vLLM would look for it.
        result.pop("auto_map", None)
    text = result.get("text_config")
    if isinstance(text, dict):
        inner = {k: v for k, v in text.items() if k != "quantization_config"}
        result["text_config"] = {k: name if k in ("dtype", "torch_dtype") else v for k, v in inner.items()}
    return result
