"""msprobe's side of the benchmark: one dump of each kind for every line on stdin, the table at the line ``end``.

    PYTHON msprobe_dump.py MODEL DTYPE TOKENS THREADS

Timed is the forward between `start` and `stop`, without `start`, `stop` and `step`, which write what is left. msprobe
prints to stdout, so the answers go to what was stdout when the process began.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from rounds import Rounds
from timed_models import build
from torch import nn

TASKS = ("statistics", "tensor")
PLAIN = "plain"


def dumped(model: nn.Module, tokens: torch.Tensor, task: str, rounds: Rounds) -> None:
    """One forward under msprobe's dump."""
    from msprobe.pytorch import PrecisionDebugger

    with tempfile.TemporaryDirectory() as directory:
        PrecisionDebugger._instance = None
        settings = {"scope": [], "list": [], "data_mode": ["forward"]}
        content = {
            "task": task,
            "dump_path": directory + "/dump",
            "rank": [],
            "step": [],
            "level": "L0",
            task: settings,
        }
        file = Path(directory) / "config.json"
        file.write_text(json.dumps(content))
        debugger = PrecisionDebugger(config_path=str(file))
        debugger.start(model=model)
        with rounds.timed(task):
            model(input_ids=tokens, use_cache=False)
        debugger.stop()
        debugger.step()
        rounds.sizes[task] = sum(path.stat().st_size for path in Path(directory, "dump").rglob("*") if path.is_file())


def main() -> None:
    """Answer the lines on stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, dtype, tokens, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model, ids = build(name, dtype, int(tokens))
    rounds = Rounds()
    turns = 0
    with torch.no_grad():
        for line in sys.stdin:
            if line == "end\n":
                break
            with rounds.timed(PLAIN):
                model(input_ids=ids, use_cache=False)
            for task in TASKS:
                dumped(model, ids, task, rounds)
            if turns == 0:
                rounds.forget()
            turns += 1
            answers.write("done\n")
            answers.flush()
    answers.write("\n".join(rounds.table(PLAIN, "msprobe")) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
