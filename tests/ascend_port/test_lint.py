"""`porter adapt --check` of ports to Ascend, and the lint in the report of an alignment."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

import porter
from porter.chips.catalogue import load_catalogue
from porter.cli.app import run as main
from porter.emulation import emulating

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.ascend_faults.fault import Place, kernel
from benchmarks.ascend_faults.workshop import CHIP, Workshop

EPSILON = kernel("norm", "weight, epsilon=eps)[0]", "weight, epsilon=1e-5)[0]")


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, porter.Golden]:
    torch.set_num_threads(1)
    return Workshop(tmp_path_factory.mktemp("lint")).port(Place("tiny-qwen3", tokens=2))


@pytest.fixture
def faulty(port: tuple[Path, porter.Golden], tmp_path: Path) -> Path:
    """The port with cache operators' epsilon in the norms."""
    copy = tmp_path / "port"
    shutil.copytree(port[0], copy)
    EPSILON.plant(copy)
    return copy


def test_a_sound_port_has_no_findings(port: tuple[Path, porter.Golden], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["adapt", "--check", str(port[0])]) == 0
    assert "0 faults, 0 notes" in capsys.readouterr().out


def test_an_argument_against_the_config_is_a_fault(faulty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["adapt", "--check", str(faulty), "--trust-remote-code", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["schema"] == "porter.ascend_lint/1" and result["faults"] == len(result["findings"]) > 0
    first = result["findings"][0]
    assert (first["rule"], first["expected"]) == ("epsilon", "1e-06")
    assert first["module"].startswith("model.layers.0.") and "epsilon of npu_" in first["what"]


def test_edited_code_is_not_run_unasked(faulty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["adapt", "--check", str(faulty)]) == 2
    assert "porter_kernels_ascend_norm.py: differs" in capsys.readouterr().err


def test_a_port_to_another_chip_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    porter.adapt("tiny-qwen3", "cpu", output=tmp_path / "port")
    assert main(["adapt", "--check", str(tmp_path / "port")]) == 2
    assert "ports to Ascend chips are checked" in capsys.readouterr().err


def test_the_alignment_tells_of_it(port: tuple[Path, porter.Golden], faulty: Path) -> None:
    with emulating(load_catalogue().get(CHIP)):
        report = porter.align(port[1], faulty, modules=r"layers\.0\.mlp$", trust_remote_code=True).to_json()
    certain = [f for f in report["lint"] if f["certain"]]
    assert report["verdict"] == "drift" and {f["kind"] for f in certain} == {"epsilon"}
    assert (certain[0]["golden"], certain[0]["candidate"]) == ("1e-06", "1e-05 (not the config's)")
