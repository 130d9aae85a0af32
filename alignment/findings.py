"""What the passes of an alignment gather."""

from __future__ import annotations

from dataclasses import dataclass, field

from porter.alignment.report import Cause, ModuleRow, Routing, Skipped, Tokens
from porter.alignment.settled import Settled
from porter.alignment.verdict import Drifted
from porter.alignment.weight import JudgedWeight


@dataclass
class Findings:
    """What the passes gather. `met`: the share of the source's parameter elements that the candidate has a parameter
    for; None without a source."""

    weights: list[JudgedWeight] = field(default_factory=list)
    rows: list[ModuleRow] = field(default_factory=list)
    drifts: list[Drifted] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    compared: set[str] = field(default_factory=set)
    skipped: list[Skipped] = field(default_factory=list)
    decisions: int = 0
    flips: int = 0
    benign: int = 0
    tokens: Tokens | None = None
    unjudged: bool = False
    met: float | None = None
    explained: set[str] = field(default_factory=set)
    """Modules whose weights drift for a cause that is known for sure."""

    @property
    def routing(self) -> Routing | None:
        """Counts over every router, None where there was none."""
        return Routing(self.decisions, self.flips, self.benign) if self.decisions else None

    def take(self, settled: Settled) -> None:
        """Add what the replay of one module found."""
        self.unjudged |= settled.failed
        self.rows += settled.rows
        self.drifts += settled.drifts
        self.causes += settled.causes
        if settled.compared:
            self.compared.add(settled.pair.module)
        else:
            self.skipped.append(Skipped(settled.pair.module, settled.why or "no tensor in common with the golden"))
        self.skipped += settled.refused
        self.decisions += settled.decisions
        self.flips += settled.flips
        self.benign += settled.benign
