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

from porter import __version__
from porter.activation_range import Range
from porter.ascend_v1.activation import loadable_scales
from porter.ascend_v1.names import DESCRIPTION, SHARD_BYTES, STEM, VERSION
from porter.ascend_v1.original import Original, original_of
from porter.ascend_v1.outputs import Conversion, counted, plans_of
from porter.ascend_v1.scheme import AscendScheme, model_quant_type, scheme_of, static_linears, types_of
from porter.ascend_v1.source import config_of, written_config, written_dtype
from porter.checkpoint.convert import Output, Progress, convert
from porter.checkpoint.reader import Checkpoint
from porter.checkpoint.validate import check_against
from porter.checkpoint.writer import CheckpointWriter
from porter.errors import PorterError
from porter.export import CARRIED
from porter.fp8_blocks import Fp8Blocks, block_size
from porter.models.own_code import family_of_checkpoint
from porter.models.presets import resolve

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
    fields = config_of(home, reference.config)
    blocks = Fp8Blocks.of(checkpoint, block_size(fields, str(home / "config.json")))
    original = original_of(reference.config, family, stored)
    beside = check_against(
        original.expected, checkpoint, ignored=(*original.ignored, *blocks.patterns), tied=original.tied
    )
    target, narrow = written_dtype(fields, dtype)
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
    config = written_config(fields, target)
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
