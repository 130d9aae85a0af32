"""Names: what the model needs against what is described, and what is described against what is stored."""

from __future__ import annotations

import re
from collections.abc import Iterator

from porter.ascend_v1.check.directory import AscendDirectory
from porter.ascend_v1.check.finding import Finding
from porter.ascend_v1.names import DESCRIPTION
from porter.ascend_v1.original import Original
from porter.ascend_v1.quant_type import FLOAT, TYPES, Shape

KEY_ERROR = "quant_description has no such key: KeyError while the layers are made"
ADD = f"add it to {DESCRIPTION}, as {FLOAT} where it is not quantized"


def missing_entries(directory: AscendDirectory) -> Iterator[Finding]:
    """Linears, embeddings and heads that the loader asks the description for, which it does not have."""
    original = directory.original
    if directory.unbuildable:
        loader = f"no model can be built from it ({directory.unknown})"
        yield Finding("config", "config.json", "", loader, "correct it; what depends on the names was not checked")
        return
    if original is None:
        yield Finding(
            "unknown-model",
            "config.json",
            "",
            f"porter cannot tell the model's names ({directory.unknown})",
            "what depends on them was not checked",
            "note",
        )
        return
    missing = [n for n, shape in original.unstacked.items() if _asked_for(n, shape) and n not in directory.types]
    prefix = _prefix(missing, directory, original)
    if prefix is not None:
        lead, lacks, explained = prefix
        loader = f"{len(explained)} names {'lack' if lacks else 'begin with'} {lead!r}, so each is a KeyError"
        yield Finding("wrong-prefix", DESCRIPTION, explained[0], loader, "rename them as the original checkpoint does")
        missing = [name for name in missing if name not in set(explained)]
    for name in missing:
        yield Finding("missing-entry", DESCRIPTION, name, KEY_ERROR, ADD)


def prediction_entries(directory: AscendDirectory) -> Iterator[Finding]:
    """Multi-token prediction layers: described as soon as they are stored, and stored where config counts on them."""
    original = directory.original
    if original is None:
        return
    stored = [n for n in directory.weights.names if original.predicts(n)]
    if original.prediction_layers and not stored and not any(original.predicts(n) for n in directory.types):
        loader = "config.json counts on prediction layers, no file holds one: speculative decoding cannot load"
        yield Finding(
            "prediction-layers", "config.json", "", loader, "convert them too, or set their number to 0", "note"
        )
    if not stored:
        return
    wanted = {n for n in stored if n.endswith(".weight") and len(directory.weights.info(n).shape) == 2}
    wanted |= _like_the_last_layer(original, stored)
    for name in sorted(n for n in wanted if n not in directory.types):
        loader = "KeyError as soon as the prediction layer is made (--speculative-config)"
        yield Finding("prediction-entry", DESCRIPTION, name, loader, ADD)


def _like_the_last_layer(original: Original, stored: list[str]) -> set[str]:
    """The linears of DeepSeek's prediction layers, whose block is a decoder layer like the last one."""
    last = f"model.layers.{original.layers - 1}."
    numbers = {m.group(1) for m in (re.match(r"model\.layers\.(\d+)\.", n) for n in stored) if m}
    names = [n for n, shape in original.unstacked.items() if n.startswith(last) and _asked_for(n, shape)]
    return {f"model.layers.{number}.{n.removeprefix(last)}" for number in numbers for n in names}


def stored_tensors(directory: AscendDirectory) -> Iterator[Finding]:
    """Entries without a tensor, tensors without an entry, and tensors in two files."""
    for name in directory.types:
        if name not in directory.weights:
            loader = "is described, but no file holds it: the parameter keeps whatever its memory held"
            yield Finding("not-stored", DESCRIPTION, name, loader, "write the tensor, or remove the entry")
    expected = directory.original.unstacked if directory.original is not None else {}
    for name in directory.weights.names:
        if name in directory.types or (directory.original is not None and directory.original.predicts(name)):
            continue
        if not (name in expected and _asked_for(name, expected[name])):
            loader = "has no entry in the description, which tells other readers its type"
            yield Finding("undescribed", directory.file_of(name), name, loader, ADD, "note")
    for name, files in directory.repeated.items():
        loader = f"is in {files}: vLLM loads both, and keeps the last"
        yield Finding("stored-twice", files.partition(" and ")[0], name, loader, "remove the files that are stale")


def unconsumed(directory: AscendDirectory) -> Iterator[Finding]:
    """Tensors that no parameter takes: biases of norms, rotations, caches' scales of another type."""
    original = directory.original
    if original is None:
        return
    for name in directory.weights.names:
        if (
            name in original.unstacked
            or original.predicts(name)
            or name in original.tied
            or _of_a_type(directory, name)
        ):
            continue
        yield from _left_over(directory, original, name)


def _left_over(directory: AscendDirectory, original: Original, name: str) -> Iterator[Finding]:
    file = directory.file_of(name)
    if name.endswith("norm.bias"):
        yield _norm_bias(directory, original, name)
    elif name.endswith((".q_rot", ".k_rot")):
        if not directory.fields.get("indexer_quant_type"):
            loader = "is read only where the description has indexer_quant_type: the rotation is lost"
            yield Finding("rotation", file, name, loader, "set indexer_quant_type, or rotate the weights back")
    elif "rotation" in name.rpartition(".")[2]:
        loader = "no operator of vllm-ascend takes this rotation; the weights stay rotated against their inputs"
        yield Finding("rotation", file, name, loader, "fold it into the weights, or write the model without it")
    elif ".kv_cache_" in name or re.search(r"\.fa_[qkv]\.", name):
        field = "kv_cache_type" if ".kv_cache_" in name else "fa_quant_type"
        if not directory.fields.get(field):
            loader = f"is read only where the description has {field}"
            yield Finding("cache-scale", file, name, loader, f"set {field}, or remove the tensor")
    elif name.endswith(("_scale_inv",)):
        loader = "belongs to FP8 blocks, which --quantization ascend does not read: KeyError on loading"
        yield Finding("fp8-raw", file, name, loader, "requantize the weight: porter adapt MODEL --format ascend-v1")
    else:
        loader = "no parameter of the model or of its type has this name: KeyError on loading, or it is lost"
        yield Finding("unconsumed", file, name, loader, "remove it, or fold it into what is loaded")


def _norm_bias(directory: AscendDirectory, original: Original, name: str) -> Finding:
    file, remedy = directory.file_of(name), "quantize without an asymmetric anti-outlier method"
    if original.zero_centered:
        loader = "AscendGemmaRMSNorm has no bias, so what the smoothing moved there is lost"
        return Finding("norm-bias", file, name, loader, remedy)
    if name not in directory.types:
        loader = "AscendRMSNorm makes a bias only where the description names one: KeyError on loading"
        return Finding("norm-bias", file, name, loader, ADD)
    loader = "is added by AscendRMSNorm; releases before it, and fused operators without a bias, leave it out"
    return Finding("norm-bias", file, name, loader, "compare the output of a layer with the float model's", "note")


def _of_a_type(directory: AscendDirectory, name: str) -> bool:
    """Whether it is one of the tensors that the type of its linear has; of other types porter does not know them."""
    prefix, _, suffix = name.rpartition(".")
    kind = directory.described.get(prefix)
    if kind is None or kind == FLOAT:
        return False
    known = TYPES.get(kind)
    return known is None or suffix in ("weight", "bias", "weight_scale", "weight_offset", *known.tensors)


def _asked_for(name: str, shape: Shape) -> bool:
    return name.endswith(".weight") and len(shape) == 2


def _prefix(missing: list[str], directory: AscendDirectory, original: Original) -> tuple[str, bool, list[str]] | None:
    """(the lead, whether the description lacks it, the names that it explains) where it explains most of `missing`."""
    extra = {n for n in directory.types if n.endswith(".weight") and n not in original.unstacked}
    for name in missing[:1]:
        for other in extra:
            longer, shorter = (name, other) if len(name) > len(other) else (other, name)
            if not longer.endswith("." + shorter):
                continue
            lead, lacks = longer[: -len(shorter)], longer == name
            explained = [n for n in missing if (n.removeprefix(lead) if lacks else lead + n) in extra]
            if 2 * len(explained) > len(missing):
                return lead, lacks, explained
    return None
