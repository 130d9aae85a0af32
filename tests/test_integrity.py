"""An exported directory that was damaged or edited does not run, and says which file and field it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import porter
from porter.cli.app import run
from porter.errors import PorterError
from porter.integrity import verify_weights
from porter.runtime import read_manifest

Make = Callable[..., Path]
NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    port = tmp_path_factory.mktemp("made") / "port"
    porter.adapt("tiny-qwen3", "cpu", output=port)
    return port


@pytest.fixture
def port(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "port")
    return tmp_path / "port"


def said(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """The one line with which the command refuses."""
    capsys.readouterr()
    assert run([str(argument) for argument in arguments]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("porter: ")]
    assert len(lines) == 1 and "--debug" not in lines[0]
    return lines[0]


def test_what_was_written_is_verified(port: Path) -> None:
    manifest = read_manifest(port)
    assert verify_weights(port, manifest) == len(load_file(port / "model.safetensors"))
    assert "config.json" in manifest["files"]
    porter.load(port, verify=True)


def test_a_flipped_bit_is_found_by_verify(port: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = bytearray((port / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (port / "model.safetensors").write_bytes(content)
    line = said(capsys, "run", port, "Once", "--verify")
    assert "model.safetensors: 1 of" in line and "tensors differ from port.json's digests" in line


def test_another_header_or_size_is_found_at_every_load(port: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(port / "model.safetensors")
    save_file(tensors, port / "model.safetensors", {"format": "pt", "by": "somebody"})
    assert "model.safetensors: its bytes differ from port.json's (weights.shards.bytes)" in said(capsys, "run", port)
    del tensors[NAME]
    save_file(tensors, port / "model.safetensors", {"format": "pt"})
    assert "model.safetensors: its bytes differ" in said(capsys, "run", port)


def test_an_edited_config_needs_consent(port: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((port / "config.json").read_text())
    (port / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert "config.json: differs from what this porter writes for the model" in said(capsys, "run", port)
    assert run(["run", str(port), "Once", "--new-tokens", "1", "--trust-remote-code"]) == 0


def test_a_port_without_weights_says_how_to_get_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    porter.adapt("qwen3-0.6b", "cpu", output=tmp_path / "port")
    line = said(capsys, "run", tmp_path / "port")
    assert "no weights; convert a checkpoint with porter adapt qwen3-0.6b --target cpu-x86" in line
    assert "--weights CHECKPOINT" in line


@pytest.mark.parametrize("field", ["chip", "scheme", "source", "files", "quantized", "correspondence", "weights"])
@pytest.mark.parametrize("value", [3, True])
def test_malformed_manifests_are_named(field: str, value: Any, port: Path) -> None:
    manifest = json.loads((port / "port.json").read_text())
    (port / "port.json").write_text(json.dumps(manifest | {field: value}))
    with pytest.raises(PorterError, match=rf"port\.json: {field}"):
        porter.load(port)
