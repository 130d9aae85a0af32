"""Load a directory that porter wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from porter.adaptation import Port, plan_port
from porter.checkpoint.reader import Checkpoint
from porter.errors import PorterError
from porter.export import code_files
from porter.loaded import refuse_made_up
from porter.models.presets import read_config


def read_manifest(directory: str | Path) -> dict[str, Any]:
    """port.json of an exported directory. Raises PorterError where there is none or it is not porter's."""
    path = Path(directory) / "port.json"
    if not path.is_file():
        raise PorterError(f"{path}: not found; give a directory that `porter adapt` wrote")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PorterError(f"{path}: not JSON ({error}); adapt the model again") from error
    if not isinstance(manifest, dict) or manifest.get("schema") != "porter.port/1":
        raise PorterError(f"{path}: schema: expected porter.port/1; adapt the model again with this porter")
    for field in ("chip", "scheme"):
        if not isinstance(manifest.get(field), str):
            raise PorterError(f"{path}: {field}: missing or not a string; adapt the model again")
    return manifest


def load(directory: str | Path, *, trust_remote_code: bool = False, strict: bool = False) -> Any:
    """The ported model of an exported directory, a PreTrainedModel in eval mode whose `generate()` works.

    The directory's code runs only if it is, byte for byte, what this porter writes for that model (then the same code
    is run from porter itself), or with `trust_remote_code`. `strict` makes an Op's fallback an error.
    """
    import transformers

    from porter.kernels.dispatch import bind_model

    folder = Path(directory)
    manifest = read_manifest(folder)
    config = read_config(folder)
    Checkpoint.open(folder)
    port = plan_port(str(folder), str(manifest["chip"]), scheme=str(manifest["scheme"]))
    different = _different_code(folder, port)
    if different and not trust_remote_code:
        raise PorterError(
            f"{folder / different}: differs from what this porter writes for the model (edited, or written by another "
            "version); adapt again, or pass --trust-remote-code to run the directory's own code"
        )
    loader: Any = transformers.AutoModelForCausalLM if different else port.source.model_class()
    keywords = {"trust_remote_code": True} if different else {"config": config}
    model, information = loader.from_pretrained(
        folder, dtype="auto", local_files_only=True, output_loading_info=True, **keywords
    )
    refuse_made_up(folder, information)
    section = getattr(config, "porter", None) or {}
    bind_model(
        model, section.get("chip", "cpu"), strict=strict, reference_only=tuple(section.get("reference_only", ()))
    )
    return model.eval()


def _different_code(folder: Path, port: Port) -> str | None:
    """The first code file that the directory lacks or has otherwise; None where all are the same."""
    for name, text in code_files(port).items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != text.encode():
            return name
    return None
