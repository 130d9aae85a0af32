"""The vendor's wheel itself, in the environment that `make ascend-wheel` sets up; run with -m torch_npu_wheel.

PORTER_TORCH_NPU_PYTHON names the interpreter of another environment that has torch_npu.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.torch_npu_wheel.recording import Recorder, record_kernels
from benchmarks.torch_npu_wheel.report import problems
from benchmarks.torch_npu_wheel.run import ROOT, main, on_wheel
from porter.kernels.ascend.catalogue.vendor_op import A2

pytestmark = pytest.mark.torch_npu_wheel
PYTHON = Path(os.environ.get("PORTER_TORCH_NPU_PYTHON", ROOT / ".venv-torch-npu" / "bin" / "python"))


@pytest.fixture(scope="module", autouse=True)
def _environment() -> None:
    assert PYTHON.exists(), f"{PYTHON} is missing: make ascend-wheel sets it up"


def test_everything_that_porter_ships_agrees_with_the_wheel(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--python", str(PYTHON), "--work", str(tmp_path / "work")]) == 0, capfd.readouterr().err


@pytest.fixture(scope="module")
def calls() -> list[dict[str, Any]]:
    """A few recorded calls of npu_rms_norm."""
    recorder = Recorder()
    assert list(record_kernels(recorder, A2)) == []
    return [c for c in recorder.calls if c["op"] == "npu_rms_norm"][:4]


def test_planted_differences_in_calls_are_found(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    planted = copy.deepcopy(calls[:3])
    planted[0]["outputs"][0]["dtype"] = "float64"
    planted[1]["outputs"][1]["shape"] = [1, 2, 3]
    planted[2]["arguments"]["epsilon"] = "small"
    (tmp_path / "work").mkdir()
    found = on_wheel(PYTHON, tmp_path / "work", [*planted, calls[3]], {})
    assert [r["verdict"] for r in found["replayed"]] == [*["different"] * 4, *["refused"] * 2, *["equal"] * 2]
    assert len(problems({**found, "failed": [], "declared": {}, "refused": {}})) == 3


SCRIPT = """
import json, sys
from pathlib import Path
from dataclasses import replace
from benchmarks.torch_npu_wheel.inside import vendor_module
from benchmarks.torch_npu_wheel.schemas import check_op
module = vendor_module(Path(sys.argv[1]))
import torch
from porter.kernels.ascend.catalogue.table import catalogue
from porter.kernels.ascend.emulator.on_wheel import emulated_on_wheel
op = catalogue()["npu_swiglu"]
planted = replace(op, schema=op.schema.replace("-1", "0")), replace(op, name="npu_no")
found = [check_op(o, module) for o in (op, *planted)]
x = torch.ones(2, 4)
with emulated_on_wheel() as emulator:
    marked, value = module.porter_emulated_chip, module.npu_swiglu(x, dim=-1).tolist()
    format_inside = module.get_npu_format(x)
try:
    module.npu_swiglu(x, dim=-1)
    left = "kernels"
except NotImplementedError:
    left = "mark" if hasattr(module, "porter_emulated_chip") else ""
print(json.dumps([found, marked, value, format_inside, left]))
"""


def test_the_emulator_takes_over_the_wheels_cpu_kernels_and_gives_them_back(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [str(PYTHON), "-c", SCRIPT, str(tmp_path / "stubs")]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    found, marked, value, format_inside, left = json.loads(result.stdout.splitlines()[-1])
    assert found[0] == []
    assert found[1] == ["npu_swiglu: dim: default is 0; the wheel has -1"]
    assert found[2] == ["npu_no: the wheel has no such operator"]
    assert marked == A2 and format_inside == 2 and left == ""
    assert value[0] == pytest.approx([0.7310585786] * 2, abs=1e-6)
