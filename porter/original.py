"""The original checkpoint that a port is compared with, under plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from porter.checkpoint.reader import Checkpoint
from porter.errors import PorterError
from porter.loaded import refuse_made_up
from porter.models.auto_class import auto_class, model_type_of
from porter.models.presets import resolve

UNLOADABLE = (OSError, ValueError, LookupError, ImportError, RuntimeError, TypeError, AttributeError)
"""What transformers raises for a checkpoint whose files are damaged or contradict each other."""


def original_directory(model: str) -> Path:
    """The directory of a shipped model, a checkpoint or a downloaded Hub id; PorterError where it has no weights."""
    reference = resolve(model)
    if reference.directory is None:
        raise PorterError(f"{model}: a preset has no weights to compare with; name a checkpoint directory")
    Checkpoint.open(reference.directory)
    return reference.directory


def original_model(directory: Path, dtype: Any = "auto", trust_remote_code: bool = False) -> Any:
    """The checkpoint as transformers builds it, in eval mode; its own code runs only with `trust_remote_code`.

    PorterError where it cannot be loaded, or a parameter is not in the checkpoint: transformers would make it up.
    """
    loader = auto_class(model_type_of(directory))
    options: dict[str, Any] = {"dtype": dtype, "local_files_only": True, "output_loading_info": True}
    try:
        loaded: Any = loader.from_pretrained(directory, trust_remote_code=trust_remote_code, **options)
    except UNLOADABLE as error:
        hint = "" if trust_remote_code else "; a checkpoint with its own code needs --trust-remote-code"
        if "ignore_mismatched_sizes" in str(error):
            hint = ": the sizes in config.json are not those of the weights"
        raise PorterError(f"{directory}: the model cannot be loaded: {_first_line(error)}{hint}") from error
    model, information = loaded
    refuse_made_up(directory, information, ignore=("unexpected_keys",))
    return model.eval()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
