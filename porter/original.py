"""The original checkpoint that a port is compared with, under plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from porter.checkpoint.reader import Checkpoint
from porter.errors import PorterError
from porter.loaded import refuse_made_up
from porter.models.presets import resolve


def original_directory(model: str) -> Path:
    """The directory of a shipped model, a checkpoint or a downloaded Hub id; PorterError where it has no weights."""
    reference = resolve(model)
    if reference.directory is None:
        raise PorterError(f"{model}: a preset has no weights to compare with; name a checkpoint directory")
    Checkpoint.open(reference.directory)
    return reference.directory


def original_model(directory: Path, dtype: Any = "auto") -> Any:
    """The checkpoint as transformers' own model, in eval mode; every weight from the checkpoint, no code from it."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": dtype, "local_files_only": True, "output_loading_info": True}
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, **options)
    model, information = loaded
    refuse_made_up(directory, information, ignore=("unexpected_keys",))
    return model.eval()
