"""The process that imports torch_npu: `python -m benchmarks.torch_npu_wheel.inside WORK`, in the wheel's environment.

WORK holds what the other process left, `calls.json`, and gets `findings.json`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.torch_npu_wheel.stub_libraries import build, load


def vendor_module(directory: Path) -> Any:
    """The vendor's torch_npu, imported against stub libraries that are built in `directory`.

    Raises RuntimeError where torch would load it by itself, before the libraries are there.
    """
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        raise RuntimeError("set TORCH_DEVICE_BACKEND_AUTOLOAD=0: torch loads torch_npu before its libraries are there")
    load(build(directory))
    return importlib.import_module("torch_npu")


def main(arguments: list[str]) -> int:
    """Check schemas, replay calls; the findings go to WORK/findings.json. Returns 0 whatever is found."""
    work = Path(arguments[0])
    module = vendor_module(work / "stubs")
    from benchmarks.torch_npu_wheel.replay import DEVICES, replay
    from benchmarks.torch_npu_wheel.schemas import check_op
    from porter.kernels.ascend.catalogue.table import catalogue

    metas = importlib.import_module("torch_npu.op_plugin.meta._meta_registrations")
    schemas = {name: check_op(op, module) for name, op in catalogue().items()}
    calls = json.loads((work / "calls.json").read_text(encoding="utf-8"))
    replayed = [replay(module, metas, call, device) for call in calls for device in DEVICES]
    findings = {
        "version": module.__version__,
        "schemas": schemas,
        "replayed": [
            {"op": r.call["op"], "chip": r.call["chip"], "device": r.device, "verdict": r.verdict, "detail": r.detail,
             "source": r.call["source"]}
            for r in replayed
        ],
    }
    (work / "findings.json").write_text(json.dumps(findings), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
