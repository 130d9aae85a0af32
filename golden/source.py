"""Loading the model that a golden is recorded from, whole and unconverted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from porter.errors import PorterError
from porter.loaded import refuse_made_up

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def source_directory(model: str, trust_remote_code: bool = False) -> Path:
    """The directory with the weights that MODEL names: a shipped model, a checkpoint directory or a downloaded Hub id.

    A checkpoint with its own code is only looked into by transformers, not here. PorterError for a preset, which has no
    weights to run, and for what names nothing.
    """
    if trust_remote_code and Path(model).is_dir():
        return Path(model)
    from porter.models.presets import resolve

    path = resolve(model).directory
    if path is None:
        raise PorterError(f"{model}: a preset has no weights to record; name a checkpoint directory")
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
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError, AttributeError) as error:
        hint = "" if trust_remote_code else "; a checkpoint with its own code needs --trust-remote-code"
        raise PorterError(f"{directory}: the model cannot be loaded: {_first_line(error)}{hint}") from error
    model, information = loaded
    refuse_made_up(directory, information, ignore=("unexpected_keys",))
    placed: nn.Module = model.to(device).eval()
    return placed


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
