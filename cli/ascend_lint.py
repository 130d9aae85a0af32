"""`porter adapt --check DIR` of a port to an Ascend chip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from porter.cli.output import emit, say


def check_port(directory: Path, *, strict: bool, trust_remote_code: bool, json_output: bool) -> int:
    """Run the port's model under the emulator and lint its calls: 0 where it is sound, 1 with faults (with `strict`,
    notes too)."""
    from porter.ascend_lint.lint import lint_directory

    say(f"running {directory} under the emulator ...")
    found = lint_directory(directory, trust_remote_code)
    faults = sum(finding.level == "fault" for finding in found)
    result: dict[str, Any] = {
        "schema": "porter.ascend_lint/1",
        "directory": str(directory),
        "faults": faults,
        "notes": len(found) - faults,
        "findings": [finding.to_json() for finding in found],
    }

    def render(console: Console) -> None:
        for finding in found:
            console.print(finding.line(), markup=False, soft_wrap=True)
        console.print(f"{directory}: {faults} faults, {len(found) - faults} notes", markup=False)

    emit(result, json_output, render)
    return 1 if faults or (strict and found) else 0
