"""Times of interleaved variants, the smallest of each against the first."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Rounds:
    """Wall and processor seconds by variant, and bytes written. The smallest counts: other load only ever adds."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self._wall: dict[str, list[float]] = defaultdict(list)
        self._processor: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timed(self, variant: str) -> Iterator[None]:
        """Time the block as one round of the variant."""
        wall, processor = time.perf_counter(), time.process_time()
        yield
        self._wall[variant].append(time.perf_counter() - wall)
        self._processor[variant].append(time.process_time() - processor)

    def forget(self) -> None:
        """Drop the rounds so far: they warmed up."""
        self._wall.clear()
        self._processor.clear()

    def table(self, plain: str, tool: str) -> list[str]:
        """A line per variant with its ratio to ``plain``."""
        lines = []
        for variant, wall in self._wall.items():
            ratios = [min(times[variant]) / min(times[plain]) for times in (self._wall, self._processor)]
            lines.append(
                f"{tool + ' ' + variant:22} wall {min(wall):.4f} s {ratios[0]:5.2f}x   processor "
                f"{min(self._processor[variant]):.4f} s {ratios[1]:5.2f}x  {self.sizes.get(variant, 0) / 1e6:8.2f} MB"
            )
        return lines
