"""The alignment certificate of an exported directory: alignment.json."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

KEPT = ("verdict", "first_drift", "tokens", "routing")


def certify(directory: Path, golden: str, report: dict[str, Any]) -> bool:
    """Enter the outcome of an alignment into `directory`/alignment.json, beside the proof; False where `directory` is
    no export. The file is replaced at once, never half written."""
    path = directory / "alignment.json"
    if not (directory / "port.json").is_file() or not path.is_file():
        return False
    certificate = json.loads(path.read_text(encoding="utf-8"))
    candidate = report["environment"]["candidate"]
    emulated = candidate.get("emulated")
    certificate["alignment"] = {
        "golden": golden,
        "evidence": "emulated" if emulated else "measured",
        "device": f"{emulated}, emulated on the CPU" if emulated else candidate.get("device"),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **{field: report[field] for field in KEPT},
        "causes": [cause["kind"] for cause in report["causes"]],
        "coverage": {name: report["coverage"][name] for name in ("modules", "parameters", "flops")},
    }
    where = f" under the emulator of {emulated}; not run on the chip" if emulated else ""
    certificate["says"] = f"{report['verdict']} against {golden}{where}"
    staged = path.with_suffix(".json.partial")
    staged.write_text(json.dumps(certificate, indent=1) + "\n", encoding="utf-8")
    os.replace(staged, path)
    return True
