"""Every load-time trap is found in a directory that has it, by its rule, and nothing is found in a sound one."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from written import DESCRIPTION, WEIGHTS, Damage, Damaged, write

from porter.ascend_v1.check.checker import check_directory
from porter.ascend_v1.codes import deq_bits
from porter.errors import PorterError

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


@pytest.mark.parametrize("fault", FAULTS)
def test_each_trap_is_found(fault: str, written: dict[str, Path], tmp_path: Path) -> None:
    scheme, damage, rule, words = FAULTS[fault]
    damaged = Damaged.copy_of(written[scheme], tmp_path / "d")
    damage(damaged)
    found = check_directory(damaged.save())
    lines = [f.line() for f in found.faults if f.rule == rule]
    assert lines, [f.line() for f in found.findings][:5]
    assert any(words in line for line in lines)
    assert all("\n" not in line for line in lines)


def test_sound_directories_have_no_findings(written: dict[str, Path]) -> None:
    for path in written.values():
        assert check_directory(path).findings == ()


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


@pytest.mark.parametrize("note", NOTES)
def test_what_costs_accuracy_is_a_note(note: str, written: dict[str, Path], tmp_path: Path) -> None:
    scheme, damage, rule, words = NOTES[note]
    damaged = Damaged.copy_of(written[scheme], tmp_path / "d")
    damage(damaged)
    found = check_directory(damaged.save())
    assert [f.line() for f in found.faults] == []
    assert any(words in f.line() for f in found.findings if f.rule == rule)


def test_a_norm_bias_of_a_zero_centered_norm_is_lost(tmp_path: Path) -> None:
    damaged = Damaged.copy_of(write("tiny-qwen3-next", tmp_path / "next", "w8a8"), tmp_path / "d")
    add("model.layers.0.input_layernorm.bias", torch.ones(128), "FLOAT")(damaged)
    found = check_directory(damaged.save())
    assert [f.rule for f in found.faults] == ["norm-bias"]
    assert "AscendGemmaRMSNorm" in found.faults[0].line()


def test_msmodelslims_float32_rounding_is_no_fault(written: dict[str, Path], tmp_path: Path) -> None:
    damaged = Damaged.copy_of(written["w8a8_static"], tmp_path / "d")
    change(f"{ATTENTION}.o_proj.quant_bias", lambda t: t + 1)(damaged)
    assert check_directory(damaged.save()).faults == ()
    change(f"{ATTENTION}.o_proj.quant_bias", lambda t: t + 2)(damaged)
    assert [f.rule for f in check_directory(damaged.save()).faults] == ["quant-bias"]


def test_tensors_in_two_files_are_named(written: dict[str, Path], tmp_path: Path) -> None:
    path = Damaged.copy_of(written["w8a16"], tmp_path / "d").save()
    save_file({"model.norm.weight": torch.ones(128)}, path / "model.safetensors")
    assert [f.rule for f in check_directory(path).faults] == ["stored-twice"]


def _empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def _huge_header(path: Path) -> None:
    (path / WEIGHTS).write_bytes(struct.pack("<Q", 2**60) + b"{}")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_empty, f"has no {DESCRIPTION}"),
        (shutil.rmtree, "is not a directory"),
        (lambda p: (p / WEIGHTS).unlink(), "no \\*.safetensors"),
        (lambda p: (p / "config.json").unlink(), "config.json"),
        (lambda p: (p / DESCRIPTION).write_text('{"a": "FLOAT", "a": "W8A8"}'), "given twice"),
        (lambda p: (p / DESCRIPTION).write_text("[" * 100_000), "nested too deeply"),
        (lambda p: (p / DESCRIPTION).write_bytes(b"\xff\xfe"), "not UTF-8"),
        (lambda p: (p / WEIGHTS).write_bytes((p / WEIGHTS).read_bytes()[:-9]), "truncated"),
        (_huge_header, "above the limit"),
        (lambda p: ((p / WEIGHTS).unlink(), (p / WEIGHTS).symlink_to("/etc/hostname")), "outside the checkpoint"),
    ],
)
def test_what_is_no_such_directory_is_refused(
    damage: Any, words: str, written: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "d"
    shutil.copytree(written["w8a16"], path)
    damage(path)
    with pytest.raises(PorterError, match=words) as raised:
        check_directory(path)
    assert raised.value.exit_code == 2
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value", [7, None, [], {"x": 1}, True, "", "\n", "W8A8" * 50_000])
def test_odd_entries_do_not_break_the_check(value: Any, written: dict[str, Path], tmp_path: Path) -> None:
    damaged = Damaged.copy_of(written["w8a16"], tmp_path / "d")
    damaged.description[f"{ATTENTION}.o_proj.weight"] = value
    damaged.config.update(text_config=value, quantization_config=value)
    found = check_directory(damaged.save())
    assert found.faults
    json.dumps(found.to_json())
    assert all(len(f.line()) < 1000 for f in found.findings)


@pytest.mark.parametrize(
    "tensor", [torch.ones(()), torch.ones(0), torch.ones(2, 2, 2), torch.ones(3, dtype=torch.int64)], ids=str
)
def test_odd_tensors_do_not_break_the_check(tensor: torch.Tensor, written: dict[str, Path], tmp_path: Path) -> None:
    damaged = Damaged.copy_of(written["w4a8"], tmp_path / "d")
    suffixes = ("weight", "weight_scale", "scale_bias", "weight_offset")
    for expert, suffix in enumerate(suffixes):
        damaged.tensors[f"model.layers.1.mlp.experts.{expert}.down_proj.{suffix}"] = tensor.clone()
    named = {f.tensor.rpartition(".")[2] for f in check_directory(damaged.save()).faults}
    assert named.issuperset(suffixes)
