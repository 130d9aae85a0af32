"""Every load-time trap is found in a directory that has it, by its rule, and nothing is found in a sound one."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_traps import ATTENTION, FAULTS, NOTES, add, change
from safetensors.torch import save_file
from written import DESCRIPTION, WEIGHTS, Damaged, write

from porter.ascend_v1.check.checker import check_directory
from porter.errors import PorterError


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
