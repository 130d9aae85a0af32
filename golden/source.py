"""Loading the model that a golden is recorded from, whole and unconverted."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from porter.errors import PorterError
from porter.original import original_model

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
"""What `porter adapt` calls them."""


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
    dtype = SHORT.get(dtype, dtype)
    if dtype not in DTYPES:
        raise PorterError(f"--dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    wanted = dtype if dtype == "auto" else getattr(torch, dtype)
    placed: nn.Module = original_model(directory, wanted, trust_remote_code).to(device)
    return placed
