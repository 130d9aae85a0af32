"""One thing that a lint has to say."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["fault", "note"]


@dataclass(frozen=True)
class LintedFault:
    """`rule` is the lint's name, `module` where; `what` is `found` where `expected` belongs, and `remedy` what to do.

    A "fault" contradicts the config or computes other numbers than were meant; a "note" costs accuracy or may be meant.
    """

    rule: str
    module: str
    what: str
    expected: str
    found: str
    remedy: str
    level: Level = "fault"

    def line(self) -> str:
        """The finding in one line."""
        place = self.module or "(model)"
        return f"{self.level}: {place}: {self.what} is {self.found}, not {self.expected}; {self.remedy} [{self.rule}]"

    def to_json(self) -> dict[str, Any]:
        """The finding for programs."""
        return asdict(self)
