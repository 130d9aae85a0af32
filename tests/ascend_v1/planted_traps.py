"""The load-time traps, each as damage to a sound directory: (scheme, damage, rule that finds it, words of its line)."""

from __future__ import annotations

from typing import Any

import torch
from written import Damage

from porter.ascend_v1.codes import deq_bits

ATTENTION = "model.layers.0.self_attn"
EXPERT = "model.layers.1.mlp.experts.3"
MTP = "model.layers.4"


def change(name: str, edit: Any) -> Damage:
    """Replace a tensor by what `edit` makes of it."""
    return lambda d: d.tensors.update({name: edit(d.tensors[name])})


def drop(name: str, tensor: bool = True, entry: bool = True) -> Damage:
    """Remove a tensor, an entry, or both."""
    return lambda d: (tensor and d.tensors.pop(name), entry and d.description.pop(name))


def add(name: str, tensor: torch.Tensor, kind: str | None = None) -> Damage:
    """Add a tensor, with an entry where a type is given."""
    return lambda d: (d.tensors.update({name: tensor}), d.description.update({name: kind} if kind else {}))


def swapped(packed: torch.Tensor) -> torch.Tensor:
    """The nibbles of every byte the other way round."""
    byte = packed.view(torch.uint8).to(torch.int16)
    return ((byte >> 4) | ((byte & 15) << 4)).to(torch.uint8).view(torch.int8)


FAULTS: dict[str, tuple[str, Damage, str, str]] = {
    "linear without entry": ("w8a8", drop(f"{ATTENTION}.o_proj.weight", tensor=False), "missing-entry", "KeyError"),
    "head without entry": ("w8a8", drop("lm_head.weight", tensor=False), "missing-entry", "lm_head"),
    "embedding without entry": ("w8a8", drop("model.embed_tokens.weight", tensor=False), "missing-entry", "KeyError"),
    "router without entry": ("w8a8", drop("model.layers.1.mlp.gate.weight", tensor=False), "missing-entry", "gate"),
    "mixed q_a and kv_a": (
        "w8a8",
        lambda d: d.retype(f"{ATTENTION}.q_a_proj", "W8A16"),
        "mixed-types",
        "fused_qkv_a_proj",
    ),
    "mixed experts": ("w8a8", lambda d: d.retype(f"{EXPERT}.up_proj", "FLOAT"), "mixed-types", "up_proj"),
    "mixed q k v": ("w8a16", lambda d: d.retype(f"{ATTENTION}.k_proj", "W8A8_DYNAMIC"), "mixed-types", "k_proj"),
    "deq_scale int64 in bf16": (
        "deepseek-w8a8",
        change(f"{ATTENTION}.o_proj.deq_scale", deq_bits),
        "deq-scale-dtype",
        "read as a number",
    ),
    "deq_scale float32 in fp16": (
        "deepseek-w8a8",
        lambda d: d.config.update(dtype="float16"),
        "deq-scale-dtype",
        "the scale becomes 0",
    ),
    "quant_bias sign": ("w8a8_static", change(f"{ATTENTION}.o_proj.quant_bias", torch.neg), "quant-bias", "sign"),
    "quant_bias zero": (
        "w8a8_static",
        change(f"{ATTENTION}.o_proj.quant_bias", torch.zeros_like),
        "quant-bias",
        "offset",
    ),
    "quant_bias of another row": (
        "w8a8_static",
        change(f"{ATTENTION}.o_proj.quant_bias", lambda t: t.roll(1)),
        "quant-bias",
        "rows",
    ),
    "nibbles swapped": ("w4a8", change(f"{EXPERT}.gate_proj.weight", swapped), "nibble-order", "other way round"),
    "nibbles of down": ("w4a8", change(f"{EXPERT}.down_proj.weight", swapped), "nibble-order", "low nibbles"),
    "scale_bias unsigned": ("w4a8", change(f"{EXPERT}.up_proj.scale_bias", lambda t: -t), "scale-bias", "constant"),
    "scale_bias of one column": (
        "w4a8",
        change(f"{EXPERT}.down_proj.scale_bias", lambda t: t.sum(1, keepdim=True)),
        "scale-bias-shape",
        "16 // tp",
    ),
    "scale_bias in one slice": (
        "w4a8",
        change(f"{EXPERT}.down_proj.scale_bias", lambda t: torch.cat([t.sum(1, keepdim=True), t[:, 1:] * 0], 1)),
        "scale-bias",
        "without tensor parallelism",
    ),
    "group_size": ("w4a8", lambda d: d.description.update(group_size=256), "group-size", "ValueError"),
    "quantization_config": (
        "w8a8",
        lambda d: d.config.update(quantization_config={"quant_method": "fp8"}),
        "quantization-config",
        "fp8",
    ),
    "quantization_config within": (
        "w8a8",
        lambda d: d.config.update(text_config={"quantization_config": {}}),
        "quantization-config",
        "text_config",
    ),
    "norm bias not described": (
        "w8a8",
        add("model.layers.0.input_layernorm.bias", torch.ones(128)),
        "norm-bias",
        "KeyError",
    ),
    "q_rot": ("w8a8", add(f"{ATTENTION}.indexer.q_rot", torch.eye(8), "FLOAT"), "rotation", "indexer_quant_type"),
    "k_rot": ("w8a8", add(f"{ATTENTION}.indexer.k_rot", torch.eye(8), "FLOAT"), "rotation", "indexer_quant_type"),
    "heads_rotation": (
        "w8a8",
        add(f"{ATTENTION}.o_proj.heads_rotation", torch.eye(4), "FLOAT"),
        "rotation",
        "no operator",
    ),
    "cache scales without type": (
        "w8a16",
        add(f"{ATTENTION}.k_proj.kv_cache_scale", torch.ones(4), "C8"),
        "cache-scale",
        "kv_cache_type",
    ),
    "no parameter": ("w8a8", add(f"{ATTENTION}.o_proj.zero_point", torch.ones(4), "FLOAT"), "unconsumed", "KeyError"),
    "prediction entry": ("w8a8", drop(f"{MTP}.self_attn.o_proj.weight", tensor=False), "prediction-entry", "KeyError"),
    "prediction head": ("w8a8", drop(f"{MTP}.shared_head.head.weight", tensor=False), "prediction-entry", "KeyError"),
    "prediction layer partly stored": (
        "w8a8",
        drop(f"{MTP}.mlp.experts.2.up_proj.weight"),
        "prediction-entry",
        "experts.2.up_proj",
    ),
    "prefix added": (
        "w8a16",
        lambda d: setattr(d, "description", {("text." + n if "." in n else n): k for n, k in d.description.items()}),
        "wrong-prefix",
        "text.",
    ),
    "prefix lost": (
        "w8a16",
        lambda d: setattr(d, "description", {n.removeprefix("model."): k for n, k in d.description.items()}),
        "wrong-prefix",
        "model.",
    ),
    "raw FP8": (
        "w8a8",
        change(f"{ATTENTION}.kv_b_proj.weight", lambda t: t.to(torch.float8_e4m3fn)),
        "fp8-raw",
        "without its scale",
    ),
    "FP8 in a quantized linear": (
        "w8a8",
        change(f"{ATTENTION}.o_proj.weight", lambda t: t.float().to(torch.float8_e4m3fn)),
        "fp8-raw",
        "parameter",
    ),
    "scale of FP8 blocks": (
        "w8a8",
        add(f"{ATTENTION}.kv_b_proj.weight_scale_inv", torch.ones(2, 1), "FLOAT"),
        "fp8-raw",
        "KeyError",
    ),
    "NaN scale": (
        "w8a8",
        change(f"{ATTENTION}.o_proj.weight_scale", lambda t: t.index_fill(0, torch.tensor([3]), torch.nan)),
        "scale-values",
        "1 of 128",
    ),
    "zero scale": ("w8a8", change(f"{EXPERT}.up_proj.weight_scale", torch.zeros_like), "scale-values", "64 of 64"),
    "infinite deq_scale": (
        "w8a8_static",
        change(f"{ATTENTION}.o_proj.deq_scale", lambda t: t / 0),
        "scale-values",
        "infinite",
    ),
    "negative input_scale": (
        "w8a8_static",
        change(f"{ATTENTION}.o_proj.input_scale", torch.neg),
        "scale-values",
        "negative",
    ),
    "weight not packed": (
        "w4a8",
        change(f"{EXPERT}.gate_proj.weight", lambda t: t.repeat_interleave(2, 0)),
        "shape",
        "another shape",
    ),
    "weight transposed": ("w8a8", change(f"{ATTENTION}.q_a_proj.weight", torch.t), "shape", "another shape"),
    "scale without its dimension": (
        "w8a8",
        change(f"{ATTENTION}.o_proj.weight_scale", lambda t: t[:, 0]),
        "shape",
        "another shape",
    ),
    "codes described as float": (
        "w8a8",
        lambda d: d.retype(f"{ATTENTION}.o_proj", "FLOAT"),
        "dtype",
        "loaded as numbers",
    ),
    "codes in int32": ("w8a8", change(f"{ATTENTION}.o_proj.weight", torch.Tensor.int), "dtype", "copied as numbers"),
    "missing deq_scale": ("w8a8_static", drop(f"{ATTENTION}.o_proj.deq_scale"), "missing-tensor", "memory"),
    "missing scale_bias": ("w4a8", drop(f"{EXPERT}.down_proj.scale_bias"), "missing-tensor", "memory"),
    "entry without tensor": ("w8a8", drop("model.norm.weight", entry=False), "not-stored", "no file holds it"),
    "unknown type": ("w8a8", lambda d: d.retype(f"{ATTENTION}.o_proj", "W3A5"), "no-method", "NotImplementedError"),
    "W4A8 for a linear": (
        "w8a8",
        lambda d: d.retype(f"{ATTENTION}.o_proj", "W4A8_DYNAMIC"),
        "no-method",
        "layer_type=linear",
    ),
    "static experts": ("w8a8", lambda d: d.retype("mlp.experts.", "W8A8"), "no-method", "layer_type=moe"),
    "quantized kv_b_proj": ("w8a8", lambda d: d.retype("kv_b_proj", "W8A8_DYNAMIC"), "kv-b-proj", "AssertionError"),
    "float32 model": ("w8a8", lambda d: d.config.update(dtype="float32"), "model-dtype", "float32"),
    "weight_offset": (
        "w8a8",
        change(f"{ATTENTION}.o_proj.weight_offset", torch.ones_like),
        "weight-offset",
        "leaves it out",
    ),
    "weight_offset of W8A16": (
        "w8a16",
        change(f"{ATTENTION}.o_proj.weight_offset", torch.ones_like),
        "weight-offset",
        "subtracts it",
    ),
    "input_offset beyond int8": (
        "w8a8_static",
        change(f"{ATTENTION}.o_proj.input_offset", lambda t: t + 500),
        "input-offset",
        "int8",
    ),
    "inputs of a fused layer": (
        "w8a8_static",
        change(f"{ATTENTION}.k_proj.input_scale", lambda t: t * 2),
        "shared-input",
        "the last loaded",
    ),
}

NOTES: dict[str, tuple[str, Damage, str, str]] = {
    "input_scale between two of bf16": (
        "w8a8_static",
        lambda d: d.tensors.update(
            {n: t * 1.003 for n, t in d.tensors.items() if n.endswith(("input_scale", "deq_scale"))}
        ),
        "rounded-scale",
        "change when they are loaded as bfloat16",
    ),
    "weight_scale between two of bf16": (
        "w8a8",
        change(f"{ATTENTION}.o_proj.weight_scale", lambda t: t * 1.003),
        "rounded-scale",
        "at most 0.",
    ),
    "norm bias described": (
        "w8a8",
        add("model.layers.0.input_layernorm.bias", torch.ones(128), "FLOAT"),
        "norm-bias",
        "releases before it",
    ),
    "no prediction layer": (
        "w8a8",
        lambda d: [drop(n)(d) for n in list(d.tensors) if n.startswith(MTP)],
        "prediction-layers",
        "speculative decoding",
    ),
    "float without entry": ("w8a8", drop("model.norm.weight", tensor=False), "undescribed", "no entry"),
    "unknown model": ("w8a16", lambda d: d.config.update(model_type="nobody"), "unknown-model", "nobody"),
}
