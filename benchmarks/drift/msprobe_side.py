"""msprobe on the same cases: its recording and its comparison, with its own rules, in its own environment.

`PYTHON -m venv msprobe`, then `msprobe/bin/pip install mindstudio-probe` and porter into it; give that interpreter.
Each case is recorded with PrecisionDebugger (task tensor, level L0, prompt and decode steps in one step) and compared
with msprobe's own comparison. What it says is the column Result of its table: pass, warning or error.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.drift.case import Case
from benchmarks.drift.judge import candidate_of, limited
from benchmarks.drift.workshop import Workshop

MODULE = re.compile(r"^(?:Module|Cell)\.(?:.*?\.)?((?:model|lm_head)(?:\..*?)?)\.[A-Z]\w*\.forward\.\d+\.(.*)$")


def run_msprobe(python: Path, seed: int, ids: Sequence[str], limit: float) -> dict[str, Any]:
    """Case id -> what msprobe said; runs this file under `python`, for `limit` seconds a case at most."""
    with tempfile.TemporaryDirectory(prefix="porter-msprobe-") as folder:
        asked, answered = Path(folder) / "ids.json", Path(folder) / "said.json"
        asked.write_text(json.dumps(list(ids)), encoding="utf-8")
        command = [str(python), "-m", "benchmarks.drift.msprobe_side", str(seed), str(asked), str(answered), str(limit)]
        root = Path(__file__).parents[2]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        done = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.DEVNULL, check=False)
        if not answered.exists():
            raise SystemExit(f"--msprobe {python}: ended with status {done.returncode} before it wrote its results")
        found: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
        return found


class Recorder:
    """Recordings by msprobe: it is one object per process and numbers its steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.debugger = importlib.import_module("msprobe.pytorch").PrecisionDebugger(
            dump_path=str(folder), task="tensor", level="L0"
        )
        self.steps = 0

    def record(self, model: Any, tokens: torch.Tensor, mask: torch.Tensor, generated: torch.Tensor) -> Path:
        """The dump.json of the prompt and the decode steps."""
        from transformers import DynamicCache

        self.debugger.start(model=model)
        with torch.no_grad():
            cache, step = DynamicCache(config=model.config), tokens
            for index in range(generated.shape[1]):
                places = (mask.cumsum(1) - 1).clamp(min=0)[:, -step.shape[1] :]
                model(input_ids=step, attention_mask=mask, position_ids=places, cache=cache, use_cache=True)
                step, mask = generated[:, index : index + 1], torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        self.debugger.stop()
        self.debugger.step()
        self.steps += 1
        return next(self.folder.glob(f"step{self.steps - 1}/*/dump.json"))


def compare(mine: Path, theirs: Path, folder: Path) -> list[tuple[str, str]]:
    """(row, result) of msprobe's table, in its order."""
    comparing = importlib.import_module("msprobe.pytorch.compare.pt_compare")
    comparing.pt_compare({"npu_path": str(mine), "bench_path": str(theirs)}, str(folder))
    table = max(folder.glob("*.csv"), key=lambda path: path.stat().st_mtime_ns)
    with table.open(encoding="utf-8-sig", newline="") as file:
        rows = [(row["NPU Name"], row["Result"]) for row in csv.DictReader(file)]
    table.unlink()
    return rows


class Examiner:
    """Runs cases; goldens and healthy candidates are recorded once each."""

    def __init__(self, folder: Path, seed: int) -> None:
        (folder / "dumps").mkdir()
        (folder / "tables").mkdir()
        (folder / "work").mkdir()
        self.tables = folder / "tables"
        self.workshop = Workshop(folder / "work", seed)
        self.recorder = Recorder(folder / "dumps")
        self._goldens: dict[Any, Path] = {}
        self._healthy: dict[Any, list[tuple[str, str]]] = {}

    def examine(self, case: Case) -> dict[str, Any]:
        """What msprobe says of one case; `differs`: otherwise than of the same candidate without the fault."""
        prepared = self.workshop.prepared(case)
        steps = torch.tensor(prepared.golden.generated).view(-1, len(prepared.tokens)).t()
        inputs = (prepared.tokens, prepared.mask, steps)
        key = (case.family.name, case.golden, case.golden_dtype)
        if key not in self._goldens:
            self._goldens[key] = self.recorder.record(prepared.source, *inputs)
        whole = (*key, case.form, case.pair)
        if case.fault is not None and whole not in self._healthy:
            # A copy: what msprobe hangs on a model would be copied into every candidate made from it.
            healthy = self.recorder.record(self.workshop.candidate(case), *inputs)
            self._healthy[whole] = compare(healthy, self._goldens[key], self.tables)
        model, _ = candidate_of(case, self.workshop)
        began = processor_seconds()
        rows = compare(self.recorder.record(model, *inputs), self._goldens[key], self.tables)
        return said(rows, self._healthy.get(whole)) | {"seconds": processor_seconds() - began}


def processor_seconds() -> float:
    """Of this process and of those that it waited for: msprobe compares in a pool."""
    return sum(os.times()[:4])


def said(rows: Sequence[tuple[str, str]], healthy: Sequence[tuple[str, str]] | None) -> dict[str, Any]:
    """Counts of rows by result, and the module of the first error."""
    first = next((MODULE.match(name) for name, result in rows if result == "error" and MODULE.match(name)), None)
    found: dict[str, Any] = {
        "rows": len(rows),
        "error": sum(result == "error" for _, result in rows),
        "warning": sum(result == "warning" for _, result in rows),
        "first": first[1] if first else None,
    }
    return found if healthy is None else found | {"differs": list(rows) != list(healthy)}


def main(arguments: Sequence[str]) -> None:
    """SEED IDS.json OUTPUT.json LIMIT, under the interpreter that has msprobe."""
    from benchmarks.drift.run import all_cases

    seed, ids = int(arguments[0]), set(json.loads(Path(arguments[1]).read_text(encoding="utf-8")))
    torch.set_num_threads(1)
    answers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="porter-msprobe-") as folder:
        examiner = Examiner(Path(folder), seed)
        for case in (case for case in all_cases(seed) if case.id in ids):
            try:
                with limited(float(arguments[3])):
                    answers[case.id] = examiner.examine(case)
            except Exception as failure:
                answers[case.id] = {"failed": f"{type(failure).__name__}: {failure}"}
            Path(arguments[2]).write_text(json.dumps(answers), encoding="utf-8")
            print(case.id, answers[case.id], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(argparse.ArgumentParser().parse_known_args()[1])
