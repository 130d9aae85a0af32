"""Loading the model that a golden is recorded from, whole and unconverted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from porter.errors import PorterError

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def source_directory(model: str) -> Path:
    """The directory of a local checkpoint or of a model that porter ships; PorterError if it is neither."""
    path = Path(model)
    if not path.is_dir():
        from porter.models.presets import shipped_directory

        path = Path(shipped_directory(model))
    if not (path / "config.json").is_file():
        raise PorterError(f"{path}: no config.json; expected a checkpoint directory")
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise PorterError(f"{path}: no *.safetensors; a golden needs the model's weights")
    return path


def device_of(name: str) -> torch.device:
    """The torch device of that name, tried with one allocation; PorterError if torch has no such device here."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise PorterError(f"--device {name}: not usable here ({reason}); `porter doctor` lists the devices") from error
    return device


def load_source(directory: Path, dtype: str, device: torch.device, trust_remote_code: bool = False) -> nn.Module:
    """The checkpoint as transformers builds it, in ``dtype`` (``auto``: the checkpoint's own), in evaluation mode.

    PorterError if a parameter is not in the checkpoint: transformers would make one up, and a golden recorded from it
    would be noise.
    """
    from transformers import AutoModelForCausalLM

    if dtype not in DTYPES:
        raise PorterError(f"--dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        hint = "" if trust_remote_code else "; a checkpoint with its own code needs --trust-remote-code"
        raise PorterError(f"{directory}: the model cannot be loaded: {_first_line(error)}{hint}") from error
    model, information = loaded
    _refuse_made_up(directory, information)
    placed: nn.Module = model.to(device).eval()
    return placed


def _refuse_made_up(directory: Path, loaded: dict[str, Any]) -> None:
    for field in ("missing_keys", "mismatched_keys"):
        names = sorted(str(name) for name in loaded.get(field, ()))
        if names:
            what = "not in the checkpoint" if field == "missing_keys" else "of another shape in the checkpoint"
            raise PorterError(f"{directory}: {len(names)} parameters are {what}, first {names[0]}; wrong config.json?")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
