"""`porter align --sweep`: the same comparison in many regimes, and the smallest one that fails.

Cheap first: source and candidate run whole in every kind of regime, lengths ascending, until one fails. Where none
does, every module is replayed at the shortest and at the greatest length, which sees faults below the noise of a whole
run. An alignment in the regime decides. The smallest one is then searched with the replay of the drifting modules
alone, or with whole alignments where only these show it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from porter.alignment.align import Progress, align
from porter.alignment.candidate import load_candidate
from porter.alignment.free_pass import STATE
from porter.alignment.regimes import Regime, fitted, kinds, lengths, text
from porter.alignment.replay import CANNOT_BE_CALLED
from porter.alignment.report import FirstDrift, Report
from porter.alignment.source import rebuild_source
from porter.alignment.sweep_account import Failure, account_of, untried
from porter.alignment.sweep_budget import REPLAYED_LENGTH, Extent, extent_of
from porter.alignment.sweep_outcome import Outcome
from porter.alignment.sweep_probe import Prober, stored_dtypes
from porter.alignment.sweep_search import smallest
from porter.errors import PorterError
from porter.golden.store import Golden

ROWS = 3
"""Rows of the widest batch."""


Judge = Callable[[Regime], "Outcome | None"]


@dataclass
class SweptReport(Report):
    """A report with what the sweep found: `account_of`. Where the golden passes and another regime fails, it is that of
    the smallest failing regime."""

    sweep: dict[str, Any] = field(default_factory=dict)


def sweep(
    golden: Golden | str | Path,
    candidate: Any,
    *,
    passes: str | tuple[str, ...] = "all",
    modules: str | None = None,
    factor: float = 2.0,
    correspondence: Any = None,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    longest: int | None = None,
    progress: Progress | None = None,
) -> SweptReport:
    """Align `candidate` with `golden`, then with the golden's source in other regimes; see `align` for the arguments.

    `longest`: greatest sequence length, default what the model's positions and a budget of work allow. Raises
    PorterError where the candidate is a recording, or the source cannot be rebuilt from the golden.
    """
    golden = golden if isinstance(golden, Golden) else Golden.open(golden)
    loaded = load_candidate(
        candidate, correspondence=correspondence, device=device, dtype=dtype, trust_remote_code=trust_remote_code
    )
    if loaded.model is None:
        raise PorterError(f"{loaded.name}: --sweep runs the candidate in other regimes; give a model, not a recording")
    source = rebuild_source(golden, trust_remote_code)
    extent = extent_of(source, longest)
    stored = stored_dtypes(source)
    report = align(
        golden,
        loaded.model,
        passes=passes,
        modules=modules,
        factor=factor,
        correspondence=loaded.correspondence,
        device=device,
        source=source,
        progress=progress,
    )
    tokens = text(extent.vocabulary, ROWS, extent.longest)
    probes = len(regimes_within(extent)) * max(1, len(golden.records))
    prober = Prober(
        loaded.model,
        source,
        loaded.correspondence,
        stored,
        tokens,
        factor,
        probes,
        torch.device(device),
        modules,
        progress or (lambda amount: None),
    )
    failure = Sweep(prober, extent).run()
    if failure is not None and report.verdict != "drift":
        report = replace(failure.report, weights=report.weights)
    report.environment["candidate"] = dict(loaded.environment)
    account = account_of(prober, extent, failure)
    skipped = (*untried(prober), *report.coverage.skipped, *prober.unmeasured)
    report = replace(report, coverage=replace(report.coverage, skipped=skipped))
    if report.verdict == "aligned" and not prober.tried:
        report = replace(report, verdict="incomparable")
    values = {each.name: getattr(report, each.name) for each in fields(Report)}
    return SweptReport(**values, sweep=account)


@dataclass(frozen=True)
class Sweep:
    """The search over one prober's regimes."""

    prober: Prober
    extent: Extent

    def run(self) -> Failure | None:
        """The smallest failing regime that was found; None where all pass."""
        for judge, regimes in (
            (self.prober.free, regimes_within(self.extent)),
            (self.prober.replayed_whole, self._ends()),
        ):
            suspects = (regime for regime in regimes if failing(judge)(regime))
            found = next(filter(None, map(self._located, suspects)), None)
            if found is not None:
                return found
        return None

    def _ends(self) -> list[Regime]:
        """The regimes in which every module is replayed: the shortest and the longest."""
        longest = _regimes_of(self.extent, min(self.extent.longest, REPLAYED_LENGTH))
        shortest = [each.at(each.shortest) for each in longest if each.batch == 1 and each.length > each.shortest]
        return [*shortest, *(each for each in longest if each.batch == 1 or each.padding != "none")]

    def _located(self, regime: Regime) -> Failure | None:
        """The smallest failing regime, from one that the alignment confirms to fail; None where it does not."""
        judge = self._judge(regime)
        if judge is None:
            return None
        found = smallest(regime, failing(judge), self.extent.far, min(self.extent.longest, REPLAYED_LENGTH))
        outcome, report = judge(found.regime), self.prober.report(found.regime)
        assert outcome is not None and report is not None, "the smallest regime was judged"
        return Failure(found, outcome, _drifting(report, outcome))

    def _judge(self, regime: Regime) -> Judge | None:
        """What tells failing from passing in the search: the replay of what drifts or raises there; where only a whole
        run shows it, the whole alignment, or whether the candidate raises."""
        prober, report = self.prober, self.prober.report(regime)
        if report is None:
            return None
        drifting = frozenset(row.module for row in report.modules if row.status == "drift" and row.why != STATE)
        broken = frozenset(s.module for s in report.coverage.skipped if s.why.startswith(CANNOT_BE_CALLED))
        judges: list[Judge] = [prober.raises]
        if report.verdict == "drift":
            judges = [partial(prober.replayed, modules=drifting), prober.aligned] if drifting else [prober.aligned]
        elif broken:
            judges = [partial(prober.replayed, modules=broken), prober.raises]
        return next((judge for judge in judges if failing(judge)(regime)), None)


def regimes_within(extent: Extent) -> list[Regime]:
    """Everything that a sweep may try, shortest first."""
    return [regime for length in lengths(extent.longest) for regime in _regimes_of(extent, length)]


def _regimes_of(extent: Extent, length: int) -> list[Regime]:
    """Every kind at that length, simplest first."""
    found = [fitted(kind, length, extent.far) for kind in kinds(extent.far, extent.routed)]
    return [regime for regime in found if regime is not None]


def failing(judge: Judge) -> Callable[[Regime], bool | None]:
    """`judge` as yes or no; None where it cannot tell."""

    def fails(regime: Regime) -> bool | None:
        outcome = judge(regime)
        return None if outcome is None else outcome.failing

    return fails


def _drifting(report: Report, outcome: Outcome) -> Report:
    """`report`, whose verdict is drift: a candidate that raises where the source runs is one too."""
    if report.verdict == "drift":
        return report
    skipped = [each for each in report.coverage.skipped if each.module and CANNOT_BE_CALLED in each.why]
    module = outcome.module or (skipped[0].module if skipped else "")
    return replace(report, verdict="drift", first_drift=FirstDrift(module, module, 0, "output"))
