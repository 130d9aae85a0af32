"""One thing that a check has to say."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from porter.checkpoint.strict_json import shown

Level = Literal["fault", "note"]


@dataclass(frozen=True)
class Finding:
    """`rule` is the check's name; `tensor` is empty where a whole file is meant.

    A "fault" fails to load, or computes other numbers than were meant; a "note" costs accuracy or depends on the
    release. `loader` is what vllm-ascend does with it, `remedy` what to do.
    """

    rule: str
    file: str
    tensor: str
    loader: str
    remedy: str
    level: Level = "fault"

    def line(self) -> str:
        """The finding in one line."""
        place = f"{self.file}: {shown(self.tensor)}" if self.tensor else self.file
        return f"{self.level}: {place}: {self.loader}; {self.remedy} [{self.rule}]"

    def to_json(self) -> dict[str, Any]:
        """The finding for programs."""
        return asdict(self)
