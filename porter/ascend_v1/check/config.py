"""config.json and the fields of the description: what turns the loader away before any tensor."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from porter.ascend_v1.check.directory import REMEDY, AscendDirectory
from porter.ascend_v1.check.finding import Finding
from porter.ascend_v1.names import DESCRIPTION
from porter.ascend_v1.source import dtype_said
from porter.checkpoint.shards import INDEX, INDEX_LIMIT
from porter.checkpoint.strict_json import listed, read_object, shown


def config(directory: AscendDirectory) -> Iterator[Finding]:
    """A quantization_config that is left, a dtype that no quantized method serves, a group size of W4A8."""
    text = directory.config.get("text_config")
    for place, where in ((directory.config, ""), (text if isinstance(text, dict) else {}, "text_config.")):
        left = place.get("quantization_config")
        if left is not None:
            method = shown(str(left.get("quant_method") if isinstance(left, dict) else left))
            loader = f"{where}quantization_config says {method}, which vLLM takes for the method and not ascend"
            yield Finding("quantization-config", "config.json", "", loader, "remove the field")
    said = dtype_said(directory.config)
    if said not in (torch.bfloat16, torch.float16):
        name = "no dtype" if said is None else str(said).removeprefix("torch.")
        loader = f"{name}: quantized linears are made for bfloat16 and float16 (no deq_scale, no int8 product, else)"
        yield Finding("model-dtype", "config.json", "", loader, "set dtype to bfloat16, or serve with --dtype")
    size = directory.fields.get("group_size", 0)
    packed = next((n for n, kind in directory.types.items() if kind == "W4A8_DYNAMIC"), None)
    if packed is not None and isinstance(size, (int, float)) and size > 0:
        loader = f"group_size {size}: ValueError, W4A8_DYNAMIC is loaded per channel only"
        yield Finding("group-size", DESCRIPTION, packed, loader, "quantize again with one scale per row")


def index(directory: AscendDirectory) -> Iterator[Finding]:
    """An index of other files, such as the original's: of local files vLLM reads those that this one names alone
    (`filter_duplicate_safetensors_files` in model_executor/model_loader/weight_utils.py)."""
    if not (directory.path / INDEX).is_file():
        return
    named = read_object(directory.path / INDEX, REMEDY, INDEX_LIMIT).get("weight_map")
    if not isinstance(named, dict):
        yield Finding("index", INDEX, "", "has no weight_map: KeyError", "remove the file")
        return
    files = {file for file in named.values() if isinstance(file, str)}
    left_out = sorted({directory.weights.info(n).shard for n in directory.weights.names} - files)
    if left_out:
        loader = f"does not name {listed(left_out)}: vLLM passes over what they hold"
        yield Finding("index", INDEX, "", loader, "remove the index, or that of other files")
