"""Differences between the wheel's meta kernels and the vendor's documents that were looked into, and what they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Explained:
    """A difference in `op` whose detail contains `contains`: `why` it is no fault of the catalogue or a kernel."""

    op: str
    contains: str
    why: str

    def fits(self, op: str, detail: str) -> bool:
        """Whether this is the difference."""
        return op == self.op and self.contains in detail


EXPLAINED: tuple[Explained, ...] = ()
