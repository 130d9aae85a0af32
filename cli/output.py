"""Where a command's words go: the result on stdout, everything else on stderr, a bar only on a terminal."""

from __future__ import annotations

import contextlib
import contextvars
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on stdout; everything else goes to stderr.")
]
"""Declare `json_output: JsonOption = False` on every command."""

PLAIN_WIDTH = 200
"""Columns of a table that is not on a terminal: wide enough that nothing a script greps for is cut."""

PLAIN_PERIOD = 5.0
"""Seconds between two plain progress lines."""

_result_stream: contextvars.ContextVar[TextIO | None] = contextvars.ContextVar("result_stream", default=None)


@contextlib.contextmanager
def only_result_on_stdout() -> Iterator[None]:
    """Send every print to stderr while the block runs, so that stdout holds what `emit` writes and nothing else."""
    token = _result_stream.set(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _result_stream.reset(token)


def emit(result: dict[str, Any], json_output: bool, render: Callable[[Console], None]) -> None:
    """Write a command's result: one JSON object with `json_output`, else whatever `render` prints on the console.

    JSON has no infinity and no NaN: both are written as null.
    """
    stream = _result_stream.get() or sys.stdout
    if json_output:
        json.dump(_finite(result), stream, indent=1, allow_nan=False)
        stream.write("\n")
    else:
        render(console(stream))
    stream.flush()


def console(stream: TextIO | None = None) -> Console:
    """A console on `stream` (stderr when None) which, away from a terminal, is wide and has no colour."""
    target = stream if stream is not None else sys.stderr
    return Console(file=target, width=None if target.isatty() else PLAIN_WIDTH, highlight=False)


def say(message: str) -> None:
    """Tell the user something that is not the result: one plain line on stderr."""
    print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(description: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show work advancing: a bar on a terminal, a line every few seconds elsewhere. Yields `advance(amount)`."""
    if sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console(), transient=True) as bar:
            task = bar.add_task(description, total=total)
            yield lambda amount: bar.advance(task, amount)
        return
    yield _plain_progress(description, total)


def _plain_progress(description: str, total: int | None) -> Callable[[int], None]:
    done, last = 0, time.monotonic()
    say(f"{description} ...")

    def advance(amount: int) -> None:
        nonlocal done, last
        done += amount
        if time.monotonic() - last >= PLAIN_PERIOD or done == total:
            last = time.monotonic()
            say(f"{description}: {done}" + (f" of {total}" if total is not None else ""))

    return advance


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
