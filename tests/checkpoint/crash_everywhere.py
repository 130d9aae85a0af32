"""Kill a conversion at each of its steps in turn, resume it, and compare. Argument: DIRECTORY.

Prints how many steps there were, and after how many of the kills the directory was in place already. A step is a
flush, a rename, a removal, or a write of a tensor; the kill comes just before it.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from raw_files import single

from porter.checkpoint import staging, writer
from porter.checkpoint.convert import Output, convert
from porter.checkpoint.reader import Checkpoint
from porter.checkpoint.writer import CheckpointWriter, TensorPlan
from porter.errors import PorterError


def halved(name: str) -> Output:
    return Output(
        (TensorPlan(name, torch.bfloat16, (9, 5)),), (name,), lambda parts: {name: parts[0].to(torch.bfloat16)}
    )


def run(source: Path, target: Path) -> None:
    outputs = [halved(f"w.{i}") for i in range(4)]
    plans = [plan for output in outputs for plan in output.plans]
    result = CheckpointWriter(target, plans, shard_bytes=200, commit_bytes=1)
    convert(Checkpoint.open(source), outputs, result)
    result.finish()


def die_before_step(step: int) -> None:
    """Patch this process so that its step number `step` is its end."""
    count = [0]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            if count[0] == step:
                os.kill(os.getpid(), signal.SIGKILL)
            count[0] += 1
            return call(*arguments, **keywords)

        return wrapped

    os.fsync = counted(os.fsync)
    Path.replace = counted(Path.replace)  # type: ignore[method-assign]
    Path.unlink = counted(Path.unlink)  # type: ignore[method-assign]
    vars(writer)["part"] = counted(staging.part)


def in_child(work: Callable[[], None]) -> bool:
    """Run `work` in a fork; False if it was killed. Any other failure ends the program."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return False
    if os.WEXITSTATUS(status):
        sys.exit(1)
    return True


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "conversion.journal"}


def opens(directory: Path) -> bool:
    try:
        Checkpoint.open(directory)
    except PorterError:
        return False
    return True


def main(directory: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    source = single(directory / "source", {f"w.{i}": torch.randn(9, 5, generator=generator) for i in range(4)})
    reference, target, partial = directory / "reference", directory / "out", directory / "out.partial"
    in_child(lambda: run(source, reference))
    wanted = contents(reference)
    step = whole = 0

    def killed() -> None:
        die_before_step(step)
        run(source, target)

    while not in_child(killed):
        if target.exists():
            whole += 1
            assert contents(target) == wanted, step
        else:
            assert not opens(partial) or contents(partial) == wanted, step
            in_child(lambda: run(source, target))
        assert contents(target) == wanted, step
        assert not partial.exists(), step
        shutil.rmtree(target)
        step += 1
    print(step, whole)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
