"""A plugin of pytest: writes the calls that tests make of the emulator to the file that PORTER_TEST_CALLS names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.torch_npu_wheel.recording import Recorder
from porter.kernels.ascend.emulator.stand_in import Emulator

RECORDER = Recorder()


@pytest.fixture(autouse=True)
def _recorded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Emulator.run

    def recorded(self: Emulator, *arguments: Any) -> Any:
        if RECORDER not in self.observers:
            self.observers.append(RECORDER)
        return run(self, *arguments)

    RECORDER.source = f"test {request.node.nodeid.rpartition('/')[2]}"
    monkeypatch.setattr(Emulator, "run", recorded)


def pytest_unconfigure() -> None:
    """Write what was recorded."""
    Path(os.environ["PORTER_TEST_CALLS"]).write_text(json.dumps(RECORDER.calls), encoding="utf-8")
