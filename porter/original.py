"""The original checkpoint that a port is compared with, under plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from porter.checkpoint.reader import CONFIG_LIMIT, Checkpoint
from porter.checkpoint.strict_json import read_object
from porter.errors import PorterError
from porter.fp8_blocks import BlockWeight, Fp8Blocks, block_size
from porter.loaded import refuse_made_up
from porter.models.auto_class import auto_class, model_class_name, model_type_of
from porter.models.presets import read_config, resolve

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
    loader: Any = auto_class(model_type_of(directory))
    options: dict[str, Any] = {"dtype": dtype, "local_files_only": True, "output_loading_info": True}
    source: Path | None = directory
    widened = _widened(directory)
    if widened is not None:
        source, options = None, options | widened
        loader = getattr(transformers, str(model_class_name(model_type_of(directory))))
    try:
        loaded: Any = loader.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
    except UNLOADABLE as error:
        hint = "" if trust_remote_code else "; a checkpoint with its own code needs --trust-remote-code"
        if "ignore_mismatched_sizes" in str(error):
            hint = ": the sizes in config.json are not those of the weights"
        raise PorterError(f"{directory}: the model cannot be loaded: {_first_line(error)}{hint}") from error
    model, information = loaded
    if information["missing_keys"] and (directory / "port.json").is_file():
        raise PorterError(f"{directory}: is a port, whose tensors have other names; name its original checkpoint")
    refuse_made_up(directory, information, ignore=("unexpected_keys",))
    return model.eval()


def _widened(directory: Path) -> dict[str, Any] | None:
    """Config and tensors of a checkpoint in FP8 blocks, as floats of the config's dtype; None of any other checkpoint.

    transformers multiplies FP8 blocks on GPUs alone, with rounded inputs.
    """
    fields = read_object(directory / "config.json", "save it again with save_pretrained", CONFIG_LIMIT, constants=True)
    stored = fields.get("quantization_config")
    known = isinstance(stored, dict) and stored.get("quant_method") == "fp8" and "weight_block_size" in stored
    if not known or model_class_name(model_type_of(directory)) is None:
        return None
    config: Any = read_config(directory)
    checkpoint = Checkpoint.open(directory)
    blocks = Fp8Blocks.of(checkpoint, block_size(fields, f"{directory}/config.json"))
    del config.quantization_config
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    state: dict[str, torch.Tensor] = {}
    scales = set(blocks.scales.values())
    for name in checkpoint.names:
        if name in scales:
            continue
        (part,) = blocks.parts((name,), [checkpoint.load(n) for n in blocks.sources((name,))])
        state[name] = part.dense(dtype) if isinstance(part, BlockWeight) else part
    return {"config": config, "state_dict": state}


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
