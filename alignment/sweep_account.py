"""What a sweep reports of itself: the smallest failing regime, everything tried, and what could not be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from porter.alignment.model_call import CannotRun
from porter.alignment.regimes import Regime
from porter.alignment.report import Report, Skipped
from porter.alignment.sweep_budget import REPLAYED_LENGTH, Extent
from porter.alignment.sweep_outcome import Outcome
from porter.alignment.sweep_probe import Prober, source_is_consistent
from porter.alignment.sweep_search import Smallest

CONSISTENT = 1e-6
"""Relative difference, in float64, that the source may show between one prefill and its parts."""


@dataclass(frozen=True)
class Failure:
    """The smallest failing regime and the alignment there."""

    smallest: Smallest
    outcome: Outcome
    report: Report


def untried(prober: Prober) -> list[Skipped]:
    """What to say first where not one regime could be tried."""
    why = next(iter(prober.not_tried.values()), "")
    return [] if prober.tried else [Skipped("", f"sweep: no regime could be tried: {why}")]


def account_of(prober: Prober, extent: Extent, failure: Failure | None) -> dict[str, Any]:
    """The report's `sweep`: what it says, the smallest failing regime and its boundary, and everything tried."""
    longest = extent.longest
    regimes = len({outcome.regime for outcome in prober.tried})
    says = f"passes in {regimes} regimes up to sequence length {longest}" if regimes else "not swept"
    return {
        "says": says if failure is None else failure.smallest.says(),
        **_failed(failure),
        "longest": longest,
        "limited_by": extent.limit,
        "tokens_per_expert": vars(prober.loads) if extent.routed else None,
        "source_inconsistent": _inconsistent(prober, extent),
        "runs": prober.runs,
        "tried": [outcome.to_json() for outcome in prober.tried],
        "not_tried": [{"regime": regime.to_json(), "why": why} for regime, why in prober.not_tried.items()],
    }


def _failed(failure: Failure | None) -> dict[str, Any]:
    if failure is None:
        return {"failing": None, "first_drift": None, "boundary": None, "passing": []}
    drift, boundary = failure.report.first_drift, failure.smallest.boundary
    return {
        "failing": failure.outcome.to_json(),
        "first_drift": None if drift is None else vars(drift),
        "boundary": None if boundary is None else vars(boundary),
        "passing": [regime.to_json() for regime in failure.smallest.passing],
    }


def _inconsistent(prober: Prober, extent: Extent) -> list[dict[str, Any]]:
    """Where the source itself gives other logits than in one prefill: there it is no yardstick."""
    found = []
    for mode in ("decode", "chunked"):
        regime = Regime(min(extent.longest, REPLAYED_LENGTH), mode=mode)
        if regime.length >= regime.shortest:
            try:
                error = source_is_consistent(prober.source, regime, prober.tokens)
            except CannotRun as failed:
                why = f"sweep: {regime.says()}: the source is not compared with its own prefill: {failed}"
                prober.unmeasured.append(Skipped("", why))
                continue
            if error > CONSISTENT:
                found.append({"regime": regime.to_json(), "error": error})
    return found
