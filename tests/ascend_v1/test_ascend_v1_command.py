"""`porter adapt --format ascend-v1` and `--check`, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from written import Damaged

from porter.cli.app import run

WRITE = ("--target", "ascend", "--format", "ascend-v1")


def porter(*words: object) -> int:
    return run([str(word) for word in words])


def test_what_adapt_writes_the_check_finds_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert porter("adapt", "tiny-qwen3-moe", *WRITE, "--scheme", "w4a8", "--output", tmp_path / "v1", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["linears"] == {"W4A8_DYNAMIC": 144, "W8A8_DYNAMIC": 12}
    assert told["output"] == str(tmp_path / "v1")
    assert porter("adapt", "--check", tmp_path / "v1") == 0
    assert "0 faults, 0 notes" in capsys.readouterr().out
    assert porter("adapt", "tiny-qwen3-moe", *WRITE, "--output", tmp_path / "v1") == 2
    assert "already exists" in capsys.readouterr().err


def test_findings_are_lines_and_make_the_status(
    written: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = Damaged.copy_of(written["w8a8"], tmp_path / "d")
    for name in damaged.tensors:
        if name.endswith("up_proj.weight_scale"):
            damaged.tensors[name] = damaged.tensors[name] * torch.nan
    assert porter("adapt", "--check", damaged.save()) == 1
    out = capsys.readouterr().out
    assert out.count("[scale-values]") == 6
    assert "more of [scale-values]; --json lists all" in out
    assert "52 faults" in out
    assert porter("adapt", "--check", damaged.path, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert len(told["findings"]) == told["faults"] == 52
    assert {"rule", "file", "tensor", "loader", "remedy", "level"} == told["findings"][0].keys()


def test_notes_count_with_strict_only(
    written: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = Damaged.copy_of(written["w8a16"], tmp_path / "d")
    name = "model.layers.0.self_attn.o_proj.weight_scale"
    damaged.tensors[name] = damaged.tensors[name] * 1.003
    damaged.save()
    assert porter("adapt", "--check", damaged.path) == 0
    assert "note: " in capsys.readouterr().out
    assert porter("adapt", "--check", damaged.path, "--strict") == 1
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("adapt", "--check", "nowhere"), "is not a directory"),
        (("adapt", "--check", "."), "no AscendV1 directory"),
        (("adapt", "tiny-qwen3", "--target", "cpu", "--format", "ascend-v1", "--plan"), "name an Ascend chip"),
        (("adapt", "tiny-qwen3", "--target", "ascend-310p", "--format", "ascend-v1", "--plan"), "choose --dtype fp16"),
        (("adapt", "tiny-qwen3", "--target", "ascend", "--format", "gguf", "--plan"), "choose porter or ascend-v1"),
        (("adapt", "tiny-qwen3", *WRITE), "--output is missing"),
        (("adapt", "tiny-qwen3", *WRITE, "--plan", "--dtype", "fp32"), "bf16 or fp16"),
        (("adapt", "tiny-qwen3", *WRITE, "--plan", "--workers", "0"), "--workers 0"),
        (("adapt", "--target", "cpu"), "name MODEL"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    words: tuple[str, ...],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert porter(*words) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("porter: ")
    assert told in last


def test_a_calibration_is_measured_from_prompts_or_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ids.json").write_text(json.dumps([[5, 7, 11, 13], [17, 19, 23, 29]]))
    options = (*WRITE, "--scheme", "w8a8_static")
    for output, given in (("measured", "ids.json"), ("read", "calibration.json")):
        path = tmp_path / output
        assert porter("adapt", "tiny-qwen3", *options, "--calibration", tmp_path / given, "--output", path) == 0
        assert porter("adapt", "--check", path, "--strict") == 0
        capsys.readouterr()
        linears = {
            f"model.layers.{n}.{at}": {"low": -2.0, "high": 3.0}
            for n in range(3)
            for at in [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
        }
        (tmp_path / "calibration.json").write_text(json.dumps({"linears": linears}))
