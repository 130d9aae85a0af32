"""Load a directory that porter wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from porter.adaptation import Port, plan_port
from porter.checkpoint.strict_json import read_object
from porter.chips.catalogue import load_catalogue, providers_of
from porter.emulation import device_to_run_on
from porter.errors import PorterError
from porter.export import code_files
from porter.integrity import CONFIG, check_manifest, check_weight_files, config_differs, verify_weights
from porter.kernels.ascend.layout import lay_out
from porter.kernels.ascend.vendor import load_torch_npu
from porter.loaded import refuse_made_up
from porter.models.auto_class import auto_class
from porter.models.presets import read_config

MANIFEST_LIMIT = 200_000_000
"""Bytes of a port.json; that of DeepSeek-V3 with its tensors' digests has about 1 MB."""


def read_manifest(directory: str | Path) -> dict[str, Any]:
    """port.json of an exported directory. Raises PorterError where there is none or it is not porter's."""
    path = Path(directory) / "port.json"
    if not path.is_file():
        raise PorterError(f"{path}: not found; give a directory that `porter adapt` wrote")
    manifest = read_object(path, "adapt the model again", MANIFEST_LIMIT)
    if manifest.get("schema") != "porter.port/1":
        raise PorterError(f"{path}: schema: expected porter.port/1; adapt the model again with this porter")
    check_manifest(manifest, path)
    return manifest


def load(
    directory: str | Path,
    *,
    trust_remote_code: bool = False,
    strict: bool = False,
    verify: bool = False,
    build: Callable[[Any, Any], Any] | None = None,
) -> Any:
    """The ported model of an exported directory, a PreTrainedModel in eval mode whose `generate()` works.

    The directory's code runs only if it is, byte for byte, what this porter writes for that model (then the same code
    is run from porter itself), or with `trust_remote_code`. `strict` makes an Op's fallback an error. Weight files are
    compared with port.json by size and header, and with `verify` tensor by tensor. `build(class, config)` makes the
    model where its weights are not to be loaded; of a directory that runs its own code they are loaded all the same.
    Quantized weights that an Ascend chip reads from blocks are cast once they are on it.
    """
    from porter.kernels.dispatch import bind_model

    folder = Path(directory)
    manifest = read_manifest(folder)
    own_code = bool(manifest["source"].get("own_code"))
    if own_code and not trust_remote_code:
        raise PorterError(f"{folder}: holds the original checkpoint's own code; pass --trust-remote-code to run it")
    target = load_catalogue().get(str(manifest["chip"]))
    place = device_to_run_on(target, folder)
    config = read_config(folder, trust_remote_code)
    if verify:
        verify_weights(folder, manifest)
    else:
        check_weight_files(folder, manifest)
    port = None if own_code else plan_port(str(folder), str(manifest["chip"]), scheme=str(manifest["scheme"]))
    different = _difference(folder, manifest, port)
    if different and not trust_remote_code:
        raise PorterError(
            f"{folder / different}: differs from what this porter writes for the model (edited, or written by another "
            "version); adapt again, or pass --trust-remote-code to run the directory as it is"
        )
    loader: Any = auto_class(config.model_type) if port is None or different else port.source.model_class()
    model = build(loader, config) if build is not None and not different else None
    if model is None:
        keywords = {"trust_remote_code": True} if different else {"config": config}
        model, information = loader.from_pretrained(
            folder, dtype="auto", local_files_only=True, output_loading_info=True, **keywords
        )
        refuse_made_up(folder, information)
    section = getattr(config, "porter", None) or {}
    chip = section.get("chip", "cpu")
    bind_model(
        model, chip, providers_of(chip), strict=strict, reference_only=tuple(section.get("reference_only", ()))
    )
    model = model.to(place).eval() if place != "cpu" else model.eval()
    if target.device == "npu" and build is None:
        lay_out(load_torch_npu(), model)
    return model


def _difference(folder: Path, manifest: dict[str, Any], port: Port | None) -> str | None:
    """The first file that is not what this porter writes for the model; None where the directory is porter's own."""
    if port is None:
        return "the original checkpoint's own code"
    return CONFIG if config_differs(folder, manifest) else _different_code(folder, port)


def _different_code(folder: Path, port: Port) -> str | None:
    """The first code file that the directory lacks or has otherwise; None where all are the same."""
    for name, text in code_files(port).items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != text.encode():
            return name
    return None
