"""`porter doctor` and `porter chips`: the JSON is complete, the text has the figures, a bad chip is exit 2."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from porter.chips import detect
from porter.chips.catalogue import load_catalogue
from porter.cli import app, doctor


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = app.run(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def as_json(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    status, out, _ = run(*arguments, "--json", capsys=capsys)
    assert status == 0
    return dict(json.loads(out))


def test_chips_lists_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    listed = as_json("chips", capsys=capsys)["chips"]
    assert [chip["name"] for chip in listed] == [chip.name for chip in load_catalogue()]
    _, text, _ = run("chips", capsys=capsys)
    assert all(chip["name"] in text for chip in listed)


def test_chips_shows_one_chip_with_its_sources(capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = as_json("chips", "ascend", capsys=capsys)["chips"]
    assert shown["name"] == "ascend-910b"
    assert shown["memory"] == {"value": 64.0, "unit": "GB", "source": shown["memory"]["source"]}
    assert "msmodeling" in shown["memory"]["source"]
    _, text, _ = run("chips", "ascend", capsys=capsys)
    assert shown["peaks"]["bfloat16"]["source"] in text and "294.9 TFLOPS" in text
    (unknown,) = as_json("chips", "mlu590", capsys=capsys)["chips"]
    assert unknown["memory"] is None
    assert "no public source" in run("chips", "mlu590", capsys=capsys)[1]


def test_an_unknown_chip_is_exit_2_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run("chips", "asend", "--json", capsys=capsys)
    assert (status, out) == (2, "")
    assert err.startswith("porter: chip 'asend'") and err.count("\n") == 1


def test_doctor_describes_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    report = as_json("doctor", capsys=capsys)
    assert report["machine"]["chip"] == detect.running_cpu_chip()
    assert report["versions"]["torch"][0].isdigit()
    assert report["torch"]["threads"] >= 1
    assert report["problems"] == []
    _, text, _ = run("doctor", capsys=capsys)
    assert detect.running_cpu_chip() in text


def test_doctor_says_when_torch_does_not_import(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    status, out, err = run("doctor", "--json", capsys=capsys)
    assert status == 1
    assert json.loads(out)["torch"] is None
    assert "torch does not import" in err and "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in err


def test_doctor_shows_the_compiler_that_builds_the_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "mycxx"
    tool.write_text("#!/bin/sh\necho 'my compiler 1.2'\necho more\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("CXX", f"{tool} -O3")
    report = as_json("doctor", capsys=capsys)
    assert report["compiler"] == {"command": f"{tool} -O3", "version": "my compiler 1.2"}
    assert report["notes"] == []
    tool.write_text("#!/bin/sh\nexit 3\n", encoding="utf-8")
    assert "does not run" in as_json("doctor", capsys=capsys)["notes"][0]


def test_doctor_notes_a_missing_compiler(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    report = as_json("doctor", capsys=capsys)
    assert report["compiler"] is None
    (note,) = report["notes"]
    assert "no-such-compiler" in note and doctor.SLOWER in note


@pytest.mark.parametrize(
    ("device", "name", "chip"),
    [
        ("cuda", "NVIDIA H200", "nvidia-h200"),
        ("cuda", "NVIDIA A100-SXM4-80GB", "nvidia-a100"),
        ("cuda", "NVIDIA GH200 480GB", None),
        ("cuda", "NVIDIA GeForce RTX 4090", None),
        ("cuda", "AMD Instinct MI300X OAM", "amd-mi300x"),
        ("npu", "Ascend910B3", "ascend-910b"),
        ("npu", "NVIDIA H200", None),
        ("musa", "MTT S4000", "moorethreads-s4000"),
        ("cuda", "MetaX C550", "metax-c550"),
        ("cuda", "Iluvatar BI-V150", "iluvatar-bi150"),
    ],
)
def test_a_driver_name_finds_its_chip(device: str, name: str, chip: str | None) -> None:
    assert doctor.chip_of(load_catalogue(), device, name) == chip
