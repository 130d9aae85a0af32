"""Types: whether the loader has a method for each, fused layers agree, and each linear has the tensors of its type."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from porter.ascend_v1.check.directory import AscendDirectory
from porter.ascend_v1.check.finding import Finding
from porter.ascend_v1.fused_groups import groups_of, loads_quantized_experts
from porter.ascend_v1.names import DESCRIPTION
from porter.ascend_v1.quant_type import FLOAT, OTHER_TYPES, TYPES, Linear, Shape, loadable
from porter.checkpoint.header import SAFETENSORS_DTYPES
from porter.checkpoint.strict_json import listed, shown

AGAIN = "write the linear again as its type has it"
FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
FLOATS = ("BF16", "F16", "F32", "F64")
CODES = ("I8", "U8")


def methods(directory: AscendDirectory) -> Iterator[Finding]:
    """Types that vllm-ascend has no method for, and layers that it wants float."""
    for name, kind in directory.described.items():
        if kind == FLOAT:
            continue
        layer = "moe" if ".experts." in name else "linear"
        if not loadable(kind, layer):  # type: ignore[arg-type]
            served = [n for n in (*TYPES, *OTHER_TYPES) if loadable(n, layer)]  # type: ignore[arg-type]
            loader = f"NotImplementedError: quant_type={shown(kind)} for layer_type={layer}"
            remedy = f"choose one of {', '.join(served[:3])} or {FLOAT}"
            yield Finding("no-method", DESCRIPTION, f"{name}.weight", loader, remedy)
        if name.endswith(".kv_b_proj"):
            loader = "AssertionError in attention/mla_v1.py: kv_b_proj has to be unquantized"
            yield Finding("kv-b-proj", DESCRIPTION, f"{name}.weight", loader, f"keep it {FLOAT}")
    experts = [n for n, kind in directory.described.items() if ".experts." in n and kind != FLOAT]
    if experts and not loads_quantized_experts(directory.model_type):
        loader = (
            f"model_type {shown(directory.model_type)} has no fused experts in packed_modules_model_mapping: KeyError"
        )
        yield Finding("no-method", DESCRIPTION, f"{experts[0]}.weight", loader, f"keep its experts {FLOAT}")


def fused_groups(directory: AscendDirectory) -> Iterator[Finding]:
    """Linears that are one layer in vLLM, of different types."""
    names = [name for name in directory.described if f"{name}.weight" in directory.types]
    for group in groups_of(names, directory.model_type):
        kinds = {name: directory.described[name] for name in group.members}
        found = sorted(set(kinds.values()))
        if len(found) < 2:
            continue
        odd = min(kinds, key=lambda name: (sum(k == kinds[name] for k in kinds.values()), name))
        loader = f'ValueError "Not all shards of {group.layer}": {listed(found)} in one fused layer'
        # vLLM may keep in_proj_qkvz and in_proj_ba apart, whatever the mapping says.
        level = "note" if group.layer.endswith(".in_proj") else "fault"
        yield Finding("mixed-types", DESCRIPTION, f"{odd}.weight", loader, "give all its parts one type", level)  # type: ignore[arg-type]


def tensors(directory: AscendDirectory) -> Iterator[Finding]:
    """Of each linear of a known type: tensors that are missing, of another dtype, or of another shape."""
    for name, linear in directory.quantized.items():
        kind = TYPES[directory.described[name]]
        for suffix, wanted in kind.specifications(linear, directory.model_dtype).items():
            full = f"{name}.{suffix}"
            if full not in directory.weights:
                loader = f"{kind.name} loads it, and no file holds it: the parameter keeps what its memory held"
                yield Finding("missing-tensor", DESCRIPTION, full, loader, AGAIN)
                continue
            yield from _compared(directory, linear, suffix, *wanted)


def _compared(
    directory: AscendDirectory, linear: Linear, suffix: str, dtype: torch.dtype, shape: Shape
) -> Iterator[Finding]:
    full = f"{linear.name}.{suffix}"
    info, file = directory.weights.info(full), directory.file_of(full)
    # The loader copies into its own parameter, so any float will do for one; codes and bits will not.
    floats = dtype == torch.float32 and suffix != "deq_scale" and info.dtype in ("F32", "BF16", "F16")
    if info.dtype != SAFETENSORS_DTYPES[dtype] and not floats:
        rule = "deq-scale-dtype" if suffix == "deq_scale" else "fp8-raw" if info.dtype in FP8 else "dtype"
        yield Finding(rule, file, full, _dtype_words(directory, suffix, info.dtype, dtype), AGAIN)
    if info.shape != shape and not _scalar(info.shape, shape):
        rule = "scale-bias-shape" if suffix == "scale_bias" else "shape"
        yield Finding(rule, file, full, _shape_words(linear, suffix, info.shape, shape), AGAIN)


def _dtype_words(directory: AscendDirectory, suffix: str, found: str, wanted: torch.dtype) -> str:
    model = str(directory.model_dtype).removeprefix("torch.")
    if suffix == "deq_scale" and found == "I64":
        return f"is I64 in a {model} model: the bits of the scale are read as a number, some 1e9 times too large"
    if suffix == "deq_scale":
        return f"is {found} in a {model} model, which reads I64 of float32 bits: the scale becomes 0"
    return f"is {found}, and is copied as numbers into a {str(wanted).removeprefix('torch.')} parameter"


def _shape_words(linear: Linear, suffix: str, found: Shape, wanted: Shape) -> str:
    told = f"is {list(found)}, where a weight [{linear.rows}, {linear.columns}] has {list(wanted)}"
    if suffix == "scale_bias" and linear.splits_inputs:
        return f"{told}: w2_scale_bias takes 16 // tp of its columns on each rank, so it fits no tensor parallel size"
    return f"{told}: the parameter it is copied into has another shape"


def _scalar(found: Shape, wanted: Shape) -> bool:
    """One value may be stored with or without a dimension."""
    return wanted == (1,) and found == ()


def plain_tensors(directory: AscendDirectory) -> Iterator[Finding]:
    """What the model needs and no type describes (norms, biases, embeddings, FLOAT linears): its shape, and that it
    holds floats."""
    expected = directory.original.unstacked if directory.original is not None else {}
    for name, shape in expected.items():
        if name not in directory.weights or name.removesuffix(".weight") in directory.quantized:
            continue
        info, kind = directory.weights.info(name), directory.types.get(name, FLOAT)
        if kind != FLOAT:
            continue
        if info.shape != shape:
            loader = f"is {list(info.shape)}, where the model has {list(shape)}: it does not fit its parameter"
            yield Finding("shape", info.shard, name, loader, "write it again, or correct config.json")
        # Codes that are described as FLOAT weights are `stored_floats`'.
        if info.dtype not in FLOATS and not (name.endswith(".weight") and info.dtype in (*FP8, *CODES)):
            loader = f"is {info.dtype}, and is copied as numbers into a floating-point parameter"
            yield Finding("dtype", info.shard, name, loader, "write it as floats")


def stored_floats(directory: AscendDirectory) -> Iterator[Finding]:
    """Entries that say FLOAT of tensors that hold codes."""
    for name, kind in directory.types.items():
        if kind != FLOAT or not name.endswith(".weight") or name not in directory.weights:
            continue
        found = directory.weights.info(name).dtype
        if found in FP8:
            loader = f"is {found} without its scale: the codes are loaded as numbers, 10 to 1000 times too large"
            remedy = "dequantize it: porter adapt MODEL --format ascend-v1"
            yield Finding("fp8-raw", directory.file_of(name), name, loader, remedy)
        elif found in CODES:
            loader = f"is {found} and described as {FLOAT}: the codes are loaded as numbers"
            yield Finding("dtype", directory.file_of(name), name, loader, "describe its type, or write it as floats")
