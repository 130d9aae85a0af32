"""What the replay of one pair of modules found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from porter.alignment.budget import Verdict
from porter.alignment.calls import Call
from porter.alignment.lanes import Seen
from porter.alignment.pairing import Pair
from porter.alignment.routing import Flips


@dataclass
class ModuleResult:
    """What the replay of one pair found, per recorded call."""

    pair: Pair
    calls: Sequence[Call]
    exact: list[Verdict | None] = field(default_factory=list)
    native: list[Verdict | None] = field(default_factory=list)
    tensors: list[list[Verdict]] = field(default_factory=list)
    """Of the native lane, every tensor observed in a call."""
    flips: list[Flips | None] = field(default_factory=list)
    why: str = ""
    """Why a lane, or the whole replay, is missing."""
    failed: bool = False
    """Whether the candidate raised where it was called as recorded."""
    outlier: str = ""
    """How the module stands out among its siblings, where only that shows a fault."""
    candidate_exact: list[Seen] = field(default_factory=list)
    candidate_native: list[Seen] = field(default_factory=list)
    oracle: list[Seen] = field(default_factory=list)

    @property
    def compared(self) -> bool:
        """Whether any lane was run to an end."""
        return any(v is not None for v in (*self.exact, *self.native))

    @property
    def over_native(self) -> bool:
        """Whether a call is over its budget in the native lane, or flipped an expert with margin."""
        over = any(v is not None and v.over for v in self.native)
        return over or any(f.excess > 0 for f in self.flips if f is not None)

    @property
    def drifted(self) -> bool:
        """Whether a call is over its budget in either lane, or flipped an expert with margin."""
        return self.over_native or any(v is not None and v.over for v in self.exact)
