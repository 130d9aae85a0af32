"""Write a checkpoint as AscendV1: original names, a type for every tensor, one linear at a time in memory."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from porter import __version__
from porter.activation_range import Range
from porter.ascend_v1.activation import loadable_scales
from porter.ascend_v1.names import DESCRIPTION, SHARD_BYTES, STEM, VERSION
from porter.ascend_v1.original import Original, original_of
from porter.ascend_v1.outputs import Conversion, counted, plans_of
from porter.ascend_v1.scheme import AscendScheme, model_quant_type, scheme_of, static_linears, types_of
from porter.checkpoint.convert import Output, Progress, convert
from porter.checkpoint.reader import CONFIG_LIMIT, Checkpoint
from porter.checkpoint.strict_json import read_object
from porter.checkpoint.validate import check_against
from porter.checkpoint.writer import CheckpointWriter
from porter.errors import PorterError
from porter.export import CARRIED
from porter.fp8_blocks import Fp8Blocks, block_size
from porter.models.own_code import family_of_checkpoint
from porter.models.presets import resolve

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


Calibrate = Callable[[Path, list[str]], Mapping[str, Range]]
"""Called with the checkpoint's directory and the names of linears: the range of each one's input."""


@dataclass(frozen=True)
class AscendV1Plan:
    """What is to be written: nothing of the weights was read. `directory` is set once it was."""

    model: str
    scheme: AscendScheme
    dtype: torch.dtype
    checkpoint: Checkpoint
    original: Original
    conversion: Conversion
    outputs: list[Output]
    config: dict[str, Any]
    dropped: tuple[str, ...] = ()
    directory: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """The plan for people and programs."""
        plans = plans_of(self.outputs)
        return {
            "model": self.model,
            "model_type": self.original.model_type,
            "format": "ascend-v1",
            "scheme": self.scheme.name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "fp8_source": len(self.conversion.blocks.scales),
            "linears": counted(self.conversion.types, self.original.linears),
            "tensors": len(plans),
            "bytes": sum(plan.nbytes for plan in plans),
            "source_bytes": self.checkpoint.total_bytes,
            "output": str(self.directory) if self.directory else None,
        }


def plan_ascend_v1(
    model: str,
    *,
    scheme: str | None = None,
    dtype: str | None = None,
    weights: Path | None = None,
    calibration: Calibrate | None = None,
    trust_remote_code: bool = False,
) -> AscendV1Plan:
    """Decide every tensor from config and headers alone.

    Raises PorterError for a model, scheme or dtype that vllm-ascend would not load, tensors that are not what the
    config calls for, and static linears without a calibrated input scale.
    """
    chosen = scheme_of(scheme)
    reference = resolve(model, trust_remote_code)
    home = weights or reference.directory
    if home is None:
        raise PorterError(f"{model}: a preset has no weights to write; name their directory with --weights")
    at = f"{reference.directory}/config.json" if reference.directory else f"preset {model}"
    family = family_of_checkpoint(reference.config, reference.directory, f"{at}: model_type", trust_remote_code)
    checkpoint = Checkpoint.open(home)
    stored = {name: checkpoint.info(name).shape for name in checkpoint.names}
    fields = _config_of(home, reference.config)
    blocks = Fp8Blocks.of(checkpoint, block_size(fields, str(home / "config.json")))
    original = original_of(reference.config, family, stored)
    beside = check_against(
        original.expected, checkpoint, ignored=(*original.ignored, *blocks.patterns), tied=original.tied
    )
    target, narrow = _dtype(fields, dtype)
    types = types_of(original, chosen)
    static = [original.linears[name] for name in static_linears(types)]
    if static and calibration is None:
        raise PorterError(
            f"--scheme {chosen.name}: {len(static)} linears quantize their input by a scale that has to be measured; "
            "give --calibration, or choose a dynamic scheme (--scheme w8a8)"
        )
    measured = calibration(home, [linear.module for linear in static]) if static and calibration else {}
    scales = loadable_scales(measured, static, original.model_type, target)
    conversion = Conversion(original, types, scales, blocks, target, narrow)
    outputs = conversion.outputs(checkpoint)
    read = {source for output in outputs for source in output.sources}
    dropped = tuple(name for name in beside if name not in read)
    config = _written_config(fields, target)
    return AscendV1Plan(model, chosen, target, checkpoint, original, conversion, outputs, config, dropped)


def write_ascend_v1(
    plan: AscendV1Plan,
    output: Path,
    *,
    workers: int = 1,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write `plan` into the new directory `output`, which appears whole or not at all; a stopped run is resumed."""
    writer = CheckpointWriter(output, plans_of(plan.outputs), shard_bytes=SHARD_BYTES, stem=STEM)
    convert(
        plan.checkpoint,
        plan.outputs,
        writer,
        workers=workers,
        progress=progress,
        allow_nonfinite=allow_nonfinite,
        dropped=plan.dropped,
        settings=_settings(plan),
    )
    _write_files(plan, writer.directory)
    return writer.finish()


def _settings(plan: AscendV1Plan) -> str:
    """What the values depend on beside names and shapes: an unfinished run with others is not continued."""
    scales = json.dumps({name: [s.scale, s.offset] for name, s in sorted(plan.conversion.scales.items())})
    return f"{plan.scheme.name}, {plan.dtype}, input scales {hashlib.sha256(scales.encode()).hexdigest()}"


def description_of(plan: AscendV1Plan) -> dict[str, Any]:
    """The quant_model_description.json of `plan`: a type for every tensor, then the fields of the whole model."""
    return plan.conversion.description | {
        "version": VERSION,
        "model_quant_type": model_quant_type(plan.conversion.types),
        "metadata": {"producer": f"porter {__version__}", "scheme": plan.scheme.name},
        "group_size": 0,
        "optional": {},
    }


def _write_files(plan: AscendV1Plan, directory: Path) -> None:
    (directory / DESCRIPTION).write_text(json.dumps(description_of(plan), indent=2) + "\n", encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(plan.config, indent=2) + "\n", encoding="utf-8")
    for name in CARRIED:
        if (plan.checkpoint.directory / name).is_file():
            shutil.copyfile(plan.checkpoint.directory / name, directory / name)


def _config_of(home: Path, config: Any) -> dict[str, Any]:
    """config.json beside the weights as it stands there, else what the model's own config says."""
    if (home / "config.json").is_file():
        return read_object(home / "config.json", "save it again with save_pretrained", CONFIG_LIMIT, constants=True)
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return fields


def _dtype(fields: Mapping[str, Any], wanted: str | None) -> tuple[torch.dtype, bool]:
    """(the dtype that vLLM loads the written model in, whether float32 weights become that)."""
    if wanted is not None and wanted not in DTYPES:
        raise PorterError(f"--dtype {wanted}: AscendV1 is loaded in {' or '.join(DTYPES)}")
    said = dtype_said(fields) or torch.float32
    if wanted is not None:
        return DTYPES[wanted], DTYPES[wanted] != said
    return (said, False) if said in (torch.bfloat16, torch.float16) else (torch.bfloat16, True)


def dtype_said(fields: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype of a config.json, of its text_config where the top says none."""
    text = fields.get("text_config")
    for place in (fields, text if isinstance(text, Mapping) else {}):
        said = place.get("dtype", place.get("torch_dtype"))
        found = getattr(torch, said, None) if isinstance(said, str) else None
        if isinstance(found, torch.dtype):
            return found
    return None


def _written_config(fields: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """config.json without quantization_config, which would make vLLM choose another loader, in the written dtype."""
    name = str(dtype).removeprefix("torch.")
    result = {key: value for key, value in fields.items() if key not in ("quantization_config", "torch_dtype", "dtype")}
    key = "torch_dtype" if "torch_dtype" in fields else "dtype"
    result[key] = name
    if result.get("model_type") in CONFIG_MAPPING:
        # Its code is not copied, and vLLM would look for it.
        result.pop("auto_map", None)
    text = result.get("text_config")
    if isinstance(text, dict):
        inner = {k: v for k, v in text.items() if k != "quantization_config"}
        result["text_config"] = {k: name if k in ("dtype", "torch_dtype") else v for k, v in inner.items()}
    return result


__all__ = ["AscendV1Plan", "description_of", "dtype_said", "plan_ascend_v1", "write_ascend_v1"]
