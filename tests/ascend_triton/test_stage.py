"""Ascend's compiler itself, in the environment that `make ascend-triton` sets up; run with -m ascend_triton.

PORTER_ASCEND_TRITON_PYTHON names the interpreter of another environment that has triton-ascend and ascendnpu-ir.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("PORTER_ASCEND_TRITON_PYTHON", ROOT / ".venv-ascend-triton" / "bin" / "python"))
pytestmark = pytest.mark.ascend_triton


@pytest.fixture(scope="module", autouse=True)
def _environment() -> None:
    assert PYTHON.exists(), f"{PYTHON} is missing: make ascend-triton sets it up"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    return subprocess.run(
        [str(PYTHON.absolute()), *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def stage(work: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "benchmarks.ascend_triton", "--work", str(work / "work"), *arguments)


@pytest.mark.parametrize("part", ("numerics", "normalised", "plans", "mutations"))
def test_everything_is_as_it_must_be(part: str, tmp_path: Path) -> None:
    done = stage(tmp_path, "--parts", part)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.endswith("\n0 problems\n") and done.stdout.count("\n| ") > 10


def test_some_ops_leave_the_report_as_it_is(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    report.write_text("as it was", encoding="utf-8")
    done = stage(tmp_path, "--parts", "plans", "--ops", "swiglu/standard", "--report", str(report))
    assert done.returncode == 0 and report.read_text(encoding="utf-8") == "as it was"


SCRIPT = """
import sys
from pathlib import Path
from dataclasses import replace
import torch
from benchmarks.ascend_triton.frontend import Frontend, Lowered
from benchmarks.ascend_triton.hivm import compile_to_hivm
from benchmarks.ascend_triton.mutations import Mutation
from benchmarks.ascend_triton.numerics import OnCpu, first_fault
from benchmarks.ascend_triton.tools import SOURCES, ToolError
from porter.kernels.triton.plans import plan

work = Path(sys.argv[1])
launch = plan("swiglu", "standard", (torch.zeros(3, 10),)).launches[0]


def refused(call, *arguments):
    try:
        call(*arguments)
    except ToolError as error:
        return str(error)


text = (SOURCES / "swiglu.py").read_text()
for name, old, new in (("syntax", "tl.exp", "tl.absent"), ("other", "limit", "bound")):
    assert old in text
    (work / name).mkdir()
    (work / name / "swiglu.py").write_text(text.replace(old, new))
    print(refused(Frontend(work / name).lower, launch))
print(refused(compile_to_hivm, Lowered("broken", {}, "module { func.func @broken( }"), "Ascend910B3"))
equal = Mutation("no change of meaning", "swiglu", "1.0 + tl.exp(-gate)", "tl.exp(-gate) + 1.0", ("swiglu", "standard"))
print(first_fault(equal, work / "equal"))
"""


def test_what_a_tool_refuses_is_told_and_a_kernel_of_the_same_meaning_passes(tmp_path: Path) -> None:
    done = run("-c", SCRIPT, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "triton refuses swiglu" in done.stdout and "has no attribute 'absent'" in done.stdout
    assert "swiglu: arguments ['bound', 'limit'] do not match" in done.stdout
    assert "bishengir-compile refuses broken for Ascend910B3" in done.stdout
    assert done.stdout.endswith("\nNone\n")
