"""Every kind of candidate: port, checkpoint, golden, Python file, module; and what each refuses."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from planted import FAULTS, bfloat16, deepseek_v3, golden_of, qwen2

import porter
from porter.alignment.align import align
from porter.alignment.candidate import load_candidate
from porter.errors import PorterError

SCHEMA = json.loads((Path(__file__).parents[1] / "alignment.schema.json").read_text())


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("dense")
    model = qwen2()
    golden = golden_of(model, folder / "golden")
    copy.deepcopy(model).save_pretrained(folder / "checkpoint")
    return model, golden, folder


def aligned(report: Any) -> bool:
    jsonschema.validate(report.to_json(), SCHEMA)
    return bool(report.verdict == "aligned")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoint_directory(dense: Any, dtype: str) -> None:
    _, golden, folder = dense
    report = align(golden, folder / "checkpoint", dtype=dtype)
    assert aligned(report), report.first_drift
    assert report.environment["candidate"]["dtype"] == dtype


def test_weights_rounded_on_the_way_are_no_float32_candidate(dense: Any, tmp_path: Path) -> None:
    model, golden, _ = dense
    bfloat16(model).save_pretrained(tmp_path / "rounded")
    report = align(golden, tmp_path / "rounded", dtype="float32", passes="weights")
    assert report.verdict == "drift"
    assert {row.status for row in report.weights if row.parameter.endswith("_proj.weight")} == {"drift"}


def test_golden_opened_by_path(dense: Any) -> None:
    _, _, folder = dense
    assert aligned(align(str(folder / "golden"), str(folder / "checkpoint")))


def test_python_file_runs_with_its_folder_on_the_path(dense: Any, tmp_path: Path) -> None:
    _, golden, folder = dense
    (tmp_path / "beside.py").write_text(f"CHECKPOINT = {str(folder / 'checkpoint')!r}\n")
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom transformers import AutoModelForCausalLM\nfrom beside import CHECKPOINT\n\n"
        "def build():\n    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)\n\n"
        "def broken():\n    raise RuntimeError('no weights')\n\ndef number():\n    return 3\n"
    )
    assert aligned(align(golden, f"{tmp_path / 'mine.py'}:build"))
    for function, word in (("broken", "no weights"), ("number", "nn.Module"), ("absent", "absent"), ("1", "function")):
        with pytest.raises(PorterError, match=word):
            load_candidate(f"{tmp_path / 'mine.py'}:{function}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recording_of_a_legitimate_run(dense: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    model, golden, _ = dense
    candidate = copy.deepcopy(model).to(dtype)
    candidate.set_attn_implementation("sdpa")
    report = align(golden, golden_of(candidate, tmp_path / "other"))
    assert aligned(report), report.first_drift
    assert report.coverage.parameters == 1.0
    assert report.tokens is not None and report.tokens.compared >= 40


@pytest.mark.parametrize("name", ["halve_key_bias", "interleave_rope", "swap_gate_and_up", "drop_residual"])
def test_recording_of_a_faulty_run(dense: Any, tmp_path: Path, name: str) -> None:
    model, golden, _ = dense
    candidate = bfloat16(model)
    with torch.no_grad():
        module = FAULTS[name](candidate)
    golden_of(candidate, tmp_path / "other")
    report = align(golden, tmp_path / "other")
    assert report.verdict == "drift"
    assert report.first_drift is not None and report.first_drift.module == module
    assert {row.module for row in report.modules if row.status == "drift"} == {module}


def test_recording_of_other_experts(tmp_path: Path) -> None:
    model = deepseek_v3()
    golden = golden_of(model, tmp_path / "golden")
    report = align(golden, golden_of(bfloat16(model), tmp_path / "other"))
    assert aligned(report), report.first_drift
    assert report.routing is not None and report.routing.flips == report.routing.benign


def test_recording_without_tensors_is_refused(dense: Any, tmp_path: Path) -> None:
    model, golden, _ = dense
    golden_of(model, tmp_path / "stats", detail="stats")
    with pytest.raises(PorterError, match="--detail full"):
        align(golden, tmp_path / "stats")


@pytest.mark.parametrize("scheme", ["bf16", "fp32", "int8", "w8a16"])
def test_port_written_by_adapt(dense: Any, tmp_path: Path, scheme: str) -> None:
    _, golden, folder = dense
    porter.adapt(str(folder / "checkpoint"), target="cpu", scheme=scheme, output=tmp_path / "port")
    report = align(golden, tmp_path / "port")
    assert aligned(report), report.first_drift
    assert report.coverage.parameters == 1.0
    assert any(row.source.endswith(".v_proj") for row in report.modules if row.module.endswith("qkv_proj"))
    assert any(row.op and row.provider for row in report.modules)


def test_port_with_exchanged_rows_is_found(dense: Any, tmp_path: Path) -> None:
    _, golden, folder = dense
    porter.adapt(str(folder / "checkpoint"), target="cpu", scheme="bf16", output=tmp_path / "port")
    port = porter.load(tmp_path / "port")
    fused = port.model.layers[1].mlp.gate_up_proj
    with torch.no_grad():
        fused.weight.copy_(torch.cat(fused.weight.chunk(2)[::-1]))
    report = align(golden, port)
    assert report.first_drift is not None and report.first_drift.module == "model.layers.1.mlp.gate_up_proj"
    assert [cause.kind for cause in report.causes][:1] == ["gate-up-swapped"]


def test_unlike_directories_are_refused(dense: Any, tmp_path: Path) -> None:
    _, golden, folder = dense
    (tmp_path / "empty").mkdir()
    with pytest.raises(PorterError, match=r"config\.json"):
        align(golden, tmp_path / "empty")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((folder / "checkpoint" / "config.json").read_text())
    with pytest.raises(PorterError, match="transformers cannot load"):
        align(golden, broken)


@pytest.mark.parametrize("name", [None, "interleave_rope"])
def test_sketched_golden_compares_weights_and_the_free_run(dense: Any, tmp_path: Path, name: str | None) -> None:
    model, _, _ = dense
    golden = golden_of(model, tmp_path / "sketch", rows=32, detail="sketch")
    candidate = bfloat16(model)
    module = FAULTS[name](candidate) if name else None
    report = align(golden, candidate)
    jsonschema.validate(report.to_json(), SCHEMA)
    assert report.verdict == ("drift" if name else "aligned"), report.first_drift
    if name:
        # Without replay the first output that is wrong names the place: a child of the module that fed it wrongly.
        assert report.first_drift is not None and report.first_drift.module.startswith(str(module))
    assert any("sketch" in skipped.why for skipped in report.coverage.skipped)


def test_statistics_alone_are_not_enough(dense: Any, tmp_path: Path) -> None:
    model, _, _ = dense
    report = align(golden_of(model, tmp_path / "stats", detail="stats"), bfloat16(model))
    assert report.verdict == "incomparable"
    assert align(golden_of(model, tmp_path / "stats", detail="stats"), bfloat16(model), passes="weights").aligned
