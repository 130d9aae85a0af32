"""All checks: record here, under the emulator; replay in a process of the wheel's environment; compare."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from benchmarks.torch_npu_wheel.generation import chip_of, generated
from benchmarks.torch_npu_wheel.recording import Recorder, record_kernels
from benchmarks.torch_npu_wheel.report import markdown, problems
from porter.adaptation import adapt
from porter.errors import PorterError, Refusal
from porter.kernels.ascend.catalogue.vendor_op import CHIPS
from porter.kernels.ascend.emulator.stand_in import emulated_npu

ROOT = Path(__file__).parents[2]
MARK = "<!-- tables -->"
PLUGIN = "benchmarks.torch_npu_wheel.recording_plugin"
MODELS = (
    ("tiny-deepseek-v2", "bf16"),
    ("tiny-deepseek-v3", "bf16"),
    ("tiny-deepseek-v3", "int8"),
    ("tiny-deepseek-v3", "w8a8"),
    ("tiny-deepseek-v3", "w4a8"),
    ("tiny-deepseek-v32", "bf16"),
    ("tiny-qwen3", "bf16"),
    ("tiny-qwen3", "int8"),
    ("tiny-qwen3", "w8a8"),
    ("tiny-qwen3-moe", "bf16"),
    ("tiny-qwen3-moe", "int8"),
    ("tiny-qwen3-next", "bf16"),
)
"""(shipped checkpoint, scheme) of each port that is made and run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was compared and what differs. Returns 1 where a difference is not explained, else 0."""
    options = _options(arguments)
    disable_progress_bar()
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    recorder, ports, refused = Recorder(), {}, {}
    _tell("recording the calls of kernels and tests under the emulator ...")
    failed = [line for chip in options.chips for line in record_kernels(recorder, chip)]
    if not options.no_tests:
        failed += record_tests(recorder, options.work)
    _tell("porting the shipped models and running them under the emulator ...")
    for model, scheme in () if options.no_ports else MODELS:
        name, directory = f"{model} {scheme}", options.work / f"{model}-{scheme}"
        try:
            adapt(model, "ascend", scheme=scheme, output=directory)
            ports[name] = directory
        except (PorterError, Refusal) as error:
            refused[name] = str(error)
    ports |= {directory.name: directory for directory in options.port}
    declared = {}
    for name, directory in ports.items():
        recorder.source = f"port {name}"
        declared[name] = generated(directory, emulated_npu(chip_of(directory)), (recorder,))
    _tell(f"{len(recorder.calls)} calls and {len(ports)} ports go to the wheel ...")
    findings = on_wheel(options.python, options.work, recorder.calls, ports)
    findings |= {"failed": failed, "declared": declared, "refused": refused}
    text = markdown(findings)
    print(text)
    if options.report is not None:
        before, mark, _ = options.report.read_text(encoding="utf-8").partition(MARK)
        options.report.write_text(f"{before}{mark}\n{text}\n", encoding="utf-8")
    unexplained = problems(findings)
    _tell(*unexplained, f"{len(unexplained)} unexplained differences")
    return 1 if unexplained else 0


def record_tests(recorder: Recorder, work: Path) -> list[str]:
    """Add the calls that the emulator's own tests make, also those of operators that no kernel uses.

    Returns the lines in which pytest names tests that failed.
    """
    target = work / "test_calls.json"
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "tests/kernels/ascend"]
    environment = {**os.environ, "PORTER_TEST_CALLS": str(target.resolve())}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    recorder.add(json.loads(target.read_text(encoding="utf-8")))
    lines = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines or ([f"pytest ended with {result.returncode}: {result.stdout[-500:]}"] if result.returncode else [])


def on_wheel(python: Path, work: Path, calls: list[dict[str, Any]], ports: dict[str, Path]) -> dict[str, Any]:
    """What a process of the interpreter `python`, which has torch_npu, finds about `calls` and `ports`.

    Raises RuntimeError where that process fails.
    """
    (work / "calls.json").write_text(json.dumps(calls), encoding="utf-8")
    (work / "ports.json").write_text(json.dumps({n: str(d.resolve()) for n, d in ports.items()}), encoding="utf-8")
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "HF_HUB_OFFLINE": "1"}
    # torch_npu refuses a process with another accelerator.
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [str(python.absolute()), "-m", "benchmarks.torch_npu_wheel.inside", str(work.resolve())]
    log = work / "wheel.log"
    with log.open("w", encoding="utf-8") as stream:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=stream, stderr=stream, check=False).returncode
    if code:
        raise RuntimeError(f"{' '.join(command)}: exit status {code}; {log} ends with {log.read_text()[-2000:]}")
    findings: dict[str, Any] = json.loads((work / "findings.json").read_text(encoding="utf-8"))
    return findings


def _tell(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torch_npu_wheel", description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="interpreter of the environment with torch_npu")
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "torch_npu_wheel", help="folder to write to")
    parser.add_argument("--chips", nargs="+", default=list(CHIPS), choices=CHIPS, help="chips whose kernels are run")
    parser.add_argument("--port", type=Path, action="append", default=[], help="an exported directory to run as well")
    parser.add_argument("--no-tests", action="store_true", help="leave out the calls of the emulator's own tests")
    parser.add_argument("--no-ports", action="store_true", help="leave out the shipped models")
    parser.add_argument("--report", type=Path, help=f"document to write the tables to, after {MARK}")
    return parser.parse_args(arguments)
