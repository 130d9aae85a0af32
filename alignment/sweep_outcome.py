"""What one regime of a sweep showed, and how many tokens the experts got."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from porter.alignment.regimes import Regime
from porter.alignment.report import Report


@dataclass(frozen=True)
class Outcome:
    """What one regime showed. `judge`: "free" (the candidate ran whole), "replay" (modules, on the source's
    inputs) or "align" (everything). `module` is the first over its limit, with error and limit where there are any."""

    regime: Regime
    judge: str
    failing: bool
    module: str | None = None
    error: float | None = None
    limit: float | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """As the report lists it."""
        rest = {name: getattr(self, name) for name in ("judge", "failing", "module", "error", "limit", "why")}
        return {"regime": self.regime.to_json(), "says": self.regime.says(), **rest}


@dataclass
class Loads:
    """Tokens per expert and call, over everything that was run: how often none, how often one, and the most."""

    none: int = 0
    one: int = 0
    most: int = 0

    def add(self, counts: Tensor) -> None:
        """Tokens [experts] of one call of one router."""
        self.none += int((counts == 0).sum())
        self.one += int((counts == 1).sum())
        self.most = max(self.most, int(counts.max()))


def of_report(regime: Regime, judge: str, report: Report) -> Outcome:
    """What an alignment in that regime showed."""
    first = report.first_drift
    if report.verdict != "drift" or first is None:
        return Outcome(regime, judge, report.verdict == "drift")
    row = next((r for r in report.modules if (r.module, r.step) == (first.module, first.step)), None)
    error, limit = (None, None) if row is None else (row.introduced, row.budget)
    return Outcome(regime, judge, True, first.module, error, limit)
