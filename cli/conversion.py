"""The progress of a conversion on the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from porter.cli.output import progress


@contextlib.contextmanager
def conversion() -> Iterator[Callable[[int, int, str], None]]:
    """Progress of a conversion, shown from its first report on, which says how many bytes there are."""
    with contextlib.ExitStack() as shown:
        advance: Callable[[int], None] | None = None
        before = 0

        def converted(done: int, total: int, name: str) -> None:
            nonlocal advance, before
            if advance is None:
                advance = shown.enter_context(progress("converting, bytes", total))
            advance(done - before)
            before = done

        yield converted
