"""msprobe's side of the benchmark: a forward alone and a dumped one for every line on stdin, the table at ``end``.

    PYTHON msprobe_dump.py TASK MODEL DTYPE TOKENS THREADS

TASK is ``statistics`` or ``tensor``. Timed is the forward between `start` and `stop`, without `start`, `stop` and
`step`, which write what is left. msprobe prints to stdout, so answers go to what was stdout when the process began.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rounds import Rounds
from timed_models import build

PLAIN = "plain"


def debugger(task: str, directory: Path) -> Any:
    """msprobe's debugger, which dumps modules' forwards below ``directory``; a process may have one."""
    from msprobe.pytorch import PrecisionDebugger

    settings = {"scope": [], "list": [], "data_mode": ["forward"]}
    place = str(directory / "dump")
    content = {"task": task, "dump_path": place, "rank": [], "step": [], "level": "L0", task: settings}
    file = directory / "config.json"
    file.write_text(json.dumps(content))
    return PrecisionDebugger(config_path=str(file))


def answer(task: str, name: str, dtype: str, tokens: int, directory: Path) -> None:
    """Answer the lines on stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    model, ids = build(name, dtype, tokens)
    rounds, dumper = Rounds(), debugger(task, directory)
    turns = 0
    for line in sys.stdin:
        if line == "end\n":
            break
        with rounds.timed(PLAIN):
            model(input_ids=ids, use_cache=False)
        dumper.start(model=model)
        with rounds.timed(task):
            model(input_ids=ids, use_cache=False)
        dumper.stop()
        dumper.step()
        if turns == 0:
            rounds.forget()
        turns += 1
        print("done", file=answers, flush=True)
    rounds.sizes[task] = sum(file.stat().st_size for file in (directory / "dump").rglob("*") if file.is_file()) // turns
    print("\n".join(rounds.table(PLAIN, "msprobe")), file=answers, flush=True)


def main() -> None:
    """Run one task."""
    task, name, dtype, tokens, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        answer(task, name, dtype, int(tokens), Path(directory))


if __name__ == "__main__":
    main()
