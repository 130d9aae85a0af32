"""Write a ported model as a directory that runs where porter is not installed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from porter.activation_range import Range
from porter.adaptation import Port, refuse_occupied
from porter.calibration import CALIBRATION_FILE
from porter.checkpoint.convert import Output, Progress, convert
from porter.checkpoint.reader import Checkpoint
from porter.checkpoint.validate import check_against
from porter.checkpoint.writer import CheckpointWriter, TensorPlan
from porter.code_bundle import native_sources, python_files, relative_imports
from porter.correspondence import Correspondence
from porter.errors import PorterError
from porter.export_readme import readme_of
from porter.export_records import certificate_of, manifest_of
from porter.fp8_blocks import Fp8Blocks, block_size
from porter.integrity import CONFIG, weight_record
from porter.kernels.dispatch import op_calls
from porter.models.generated import own_package
from porter.models.modelling_source import upstream_diff
from porter.models.own_code import companion_files, own_classes
from porter.models.port import source_on_meta, tied_weights
from porter.quantization import STATIC
from porter.recipe import TensorRecipe, consumed, recipes

CARRIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Files of tokenizers, processors and generation that are copied as they are; no code among them."""

LOCATE_SOURCES = "        set_source_directory(config._name_or_path)\n"
APPLY_SCHEMES = "        apply_schemes(self, config)\n"
LOCATE_IMPORT = "from porter.kernels.cpu.build import set_source_directory\n"


def code_files(port: Port) -> dict[str, str]:
    """Every code file of the exported directory, by name: modelling file, the modules it imports, C++ sources."""
    on_cpu = port.chip.device == "cpu"
    text = _finding_sources(port.source.text) if on_cpu else port.source.text
    own = companion_files(port.source.module, port.source.text, port.reference.config)
    files = {port.source.file_name: relative_imports(text), **own, **python_files(text, port.chip)}
    return files | native_sources() if on_cpu else files


def _finding_sources(text: str) -> str:
    """The modelling file, which when a model is built looks for the kernels' C++ sources in its checkpoint."""
    for line, before in ((LOCATE_IMPORT, "from porter.models.linear import"), (LOCATE_SOURCES, APPLY_SCHEMES)):
        text = text.replace(before, line + before, 1)
    return text


def export(
    port: Port,
    output: Path,
    *,
    weights: Path | None,
    workers: int = 1,
    reference_only: tuple[str, ...] = (),
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
) -> Port:
    """Convert the weights of checkpoint `weights` shard by shard and write `output`, moved into place at the end.

    Without weights (a preset that has none) the code, the plan and the conversion recipe are written. Raises
    PorterError when the output exists, or the checkpoint's tensors are not what its config needs.
    """
    refuse_occupied(output)
    ported = port.skeleton()
    tied = tied_weights(port.reference.config, port.family.module, port.family.class_name)
    predicting = port.prediction_state()
    plan = recipes(ported, *_correspondences(port), tied, port.dtype, predicting, _ranges(port))
    plan = [r for r in plan if not (port.config.tie_word_embeddings and r.outputs.keys() & tied.keys())]
    if weights is None:
        return _write_code_only(port, output, plan)
    checkpoint = Checkpoint.open(weights)
    ignored = getattr(port.source.model_class(), "_keys_to_ignore_on_load_unexpected", None) or ()
    copies = {} if port.prediction is None else {n: tied.get(of, of) for n, of in port.prediction.copies.items()}
    blocks = Fp8Blocks.of(checkpoint, block_size(*_quantization(checkpoint, port)))
    ignored = (*ignored, *blocks.patterns)
    dropped = check_against(_expected(port, tied), checkpoint, ignored=ignored, tied=tied | copies)
    dropped = blocks.dropped(dropped)
    _refuse_other_than_floats(checkpoint, consumed(r for r in plan if not _is_table(r)) - blocks.scales.keys())
    _refuse_unknown_experts(checkpoint, ported, [r for r in plan if _is_table(r)])
    plan = [blocks.reading(recipe) for recipe in plan]
    outputs = [Output(_tensor_plans(r), r.sources, r.compute, r.pieces) for r in plan]
    writer = CheckpointWriter(output, [p for o in outputs for p in o.plans])
    convert(
        checkpoint,
        outputs,
        writer,
        workers=workers,
        progress=progress,
        allow_nonfinite=allow_nonfinite,
        dropped=dropped,
    )
    _write_files(writer.directory, port, checkpoint.digests(), weight_record(writer), weights, reference_only)
    writer.finish()
    return dataclasses.replace(port, directory=output)


def _quantization(checkpoint: Checkpoint, port: Port) -> tuple[Any, str]:
    """What says how the weights are stored, and where it stands: their own config.json, else the model's."""
    file = checkpoint.directory / CONFIG
    return (checkpoint.config, str(file)) if file.is_file() else (port.reference.config, port.reference.name)


def _correspondences(port: Port) -> tuple[Correspondence, Correspondence]:
    """Between upstream and the port, and between the checkpoint and upstream, prediction layers among them."""
    beside = (port.prediction.correspondence, port.prediction.layout) if port.prediction else (Correspondence(),) * 2
    both = zip((port.correspondence, port.layout), beside, strict=True)
    model, layout = (Correspondence((*of_model.entries, *of_layers.entries)) for of_model, of_layers in both)
    return model, layout


def _ranges(port: Port) -> dict[str, Range]:
    """Of the inputs of the linears with a static scale, by the linear's name; none before they were measured."""
    static = [name for name, scheme in port.config.porter["quantized"].items() if scheme == STATIC]
    return {} if port.calibration is None else port.calibration.of_modules(static, port.correspondence)


def _is_table(recipe: TensorRecipe) -> bool:
    """Whether the model itself holds integers there, such as experts by token id."""
    return not any(dtype.is_floating_point or dtype == torch.int8 for dtype, _ in recipe.outputs.values())


def _refuse_other_than_floats(checkpoint: Checkpoint, names: set[str]) -> None:
    """Integers and 8-bit floats are codes of quantized weights: without their scales they mean nothing."""
    for name in sorted(names):
        info = checkpoint.info(name)
        dtype = info.torch_dtype
        if dtype is None or not dtype.is_floating_point or dtype.itemsize < 2:
            raise PorterError(
                f"{checkpoint.directory / info.shard}: tensor {name} is {info.dtype}: quantized weights are not read "
                "where no quantization_config says what they mean; give the checkpoint in bf16, fp32 or FP8 blocks"
            )


def _refuse_unknown_experts(checkpoint: Checkpoint, ported: nn.Module, tables: list[TensorRecipe]) -> None:
    """PorterError for a router's table of experts by token id that names experts which the router does not have: it
    would show only when such a token comes."""
    routers = {s.rpartition(".")[0] for s, call in op_calls(ported) if (call.name, call.variant) == ("router", "hash")}
    for recipe in tables:
        (name,) = recipe.outputs
        router = name.rpartition(".")[0]
        if router not in routers:
            continue
        count = int(ported.get_parameter(f"{router}.weight").shape[0])
        table = checkpoint.load(recipe.sources[0])
        if table.numel() and not 0 <= int(table.min()) <= int(table.max()) < count:
            raise PorterError(
                f"{checkpoint.directory}: tensor {recipe.sources[0]} names experts from {int(table.min())} to "
                f"{int(table.max())}; the router has {count}; repair the checkpoint"
            )


def _tensor_plans(recipe: TensorRecipe) -> tuple[TensorPlan, ...]:
    return tuple(TensorPlan(name, dtype, shape) for name, (dtype, shape) in recipe.outputs.items())


def _expected(port: Port, tied: dict[str, str]) -> dict[str, tuple[int, ...]]:
    """Names and shapes that a checkpoint of this config must hold, from the upstream class and the disk layout."""
    upstream = source_on_meta(port.reference.config, port.family.module, port.family.class_name)
    expected = dict(port.prediction.expected) if port.prediction is not None else {}
    for name, tensor in upstream.state_dict().items():
        if name not in tied:
            expected |= port.layout.source_shapes(name, tuple(tensor.shape))
    return expected


def _write_code_only(port: Port, output: Path, plan: list[TensorRecipe]) -> Port:
    staging = output.with_name(output.name + ".partial")
    if staging.exists():
        raise PorterError(f"{staging}: an unfinished conversion lies there; resume it with --weights, or remove it")
    staging.mkdir(parents=True)
    _write_files(staging, port, {}, None, None, ())
    recipe = [
        {
            "outputs": {n: {"dtype": str(d).removeprefix("torch."), "shape": s} for n, (d, s) in r.outputs.items()},
            "sources": r.sources,
        }
        for r in plan
    ]
    (staging / "conversion.json").write_text(json.dumps(recipe) + "\n")
    staging.replace(output)
    return dataclasses.replace(port, directory=output)


def _write_files(
    directory: Path,
    port: Port,
    digests: dict[str, str],
    written: dict[str, Any] | None,
    weights: Path | None,
    reference_only: tuple[str, ...],
) -> None:
    """Everything but the weights: `digests` are of the source's files, `written` is the record of the port's own."""
    config = json.dumps(_config(port, reference_only), indent=2, default=str) + "\n"
    files = code_files(port) | {CONFIG: config}
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    diff = upstream_diff(port.source.module, files[port.source.file_name], port.source.file_name)
    (directory / "upstream.diff").write_text(diff, encoding="utf-8")
    for name in CARRIED:
        if weights is not None and (weights / name).is_file():
            shutil.copyfile(weights / name, directory / name)
    if port.calibration is not None:
        (directory / CALIBRATION_FILE).write_text(json.dumps(port.calibration.to_json(), indent=1) + "\n")
    (directory / "README.md").write_text(readme_of(port), encoding="utf-8")
    (directory / "port.json").write_text(json.dumps(manifest_of(port, files, digests, written), indent=1) + "\n")
    (directory / "alignment.json").write_text(json.dumps(certificate_of(port), indent=1) + "\n")


def _config(port: Port, reference_only: tuple[str, ...]) -> dict[str, Any]:
    data: dict[str, Any] = port.config.to_dict()
    data.pop("_name_or_path", None)
    stem = port.source.file_name.removesuffix(".py")
    data["auto_map"] = {port.family.auto_class: f"{stem}.{port.family.class_name}"}
    if own_package(port.source.module) and "AutoConfig" in (own := own_classes(port.reference.directory)):
        data["auto_map"]["AutoConfig"] = own["AutoConfig"].rpartition("--")[2]
    data["architectures"] = [port.family.class_name]
    data["dtype"] = str(port.dtype).removeprefix("torch.")
    data["porter"] = {**port.config.porter, "reference_only": list(reference_only)}
    return data
