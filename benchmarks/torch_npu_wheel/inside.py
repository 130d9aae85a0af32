"""The process that imports torch_npu: `python -m benchmarks.torch_npu_wheel.inside WORK`, in the wheel's environment.

WORK holds what the other process left, `calls.json` and `ports.json` (name to directory), and gets `findings.json`.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.torch_npu_wheel.generation import chip_of, generated
from benchmarks.torch_npu_wheel.replay import DEVICES, replay
from benchmarks.torch_npu_wheel.schemas import check_op
from benchmarks.torch_npu_wheel.stub_libraries import build, load
from benchmarks.torch_npu_wheel.tracing import traced
from porter.kernels.ascend.catalogue.table import catalogue
from porter.kernels.ascend.emulator.on_wheel import emulated_on_wheel

METAS = "torch_npu.op_plugin.meta._meta_registrations"


def vendor_module(directory: Path) -> Any:
    """The vendor's torch_npu, imported against stub libraries that are built in `directory`.

    The process needs TORCH_DEVICE_BACKEND_AUTOLOAD=0: torch would load torch_npu before the libraries are there.
    """
    load(build(directory))
    return importlib.import_module("torch_npu")


def main(arguments: list[str]) -> int:
    """Check schemas, replay calls, run ports; what was found goes to WORK/findings.json. Returns 0 whatever that is."""
    work = Path(arguments[0])
    module = vendor_module(work / "stubs")
    metas = importlib.import_module(METAS)
    calls = json.loads((work / "calls.json").read_text(encoding="utf-8"))
    ports = json.loads((work / "ports.json").read_text(encoding="utf-8"))
    findings = {
        "version": module.__version__,
        "schemas": {name: check_op(op, module) for name, op in catalogue().items()},
        "replayed": [asdict(replay(module, metas, call, device)) for call in calls for device in DEVICES],
        "generated": {name: generated(Path(d), emulated_on_wheel(chip_of(Path(d)))) for name, d in ports.items()},
        "traced": {name: traced(Path(d), metas) for name, d in ports.items()},
    }
    (work / "findings.json").write_text(json.dumps(findings), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
