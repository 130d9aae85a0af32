"""The alignment of two recordings: replay on the candidate's records, end to end where both saw the same tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from porter.alignment.calls import Recorded
from porter.alignment.candidate import Candidate
from porter.alignment.diagnosis import drift_of
from porter.alignment.hypotheses.catalogue import explain
from porter.alignment.module_result import ModuleResult
from porter.alignment.pairing import pair_modules
from porter.alignment.recorded_candidate import RecordedReplayer
from porter.alignment.recorded_errors import EndToEnd
from porter.alignment.report import Report, Routing, Skipped
from porter.alignment.rounded_source import round_to
from porter.alignment.rows import drifts_of, rows_of
from porter.alignment.siblings import Siblings
from porter.alignment.verdict import Drifted, coverage, first_of, verdict_of
from porter.errors import PorterError
from porter.golden.format import dtype_of
from porter.golden.store import Golden

CAUSES_FOR = 3
"""How many drifting modules are diagnosed."""


def align_recorded(
    golden: Golden,
    candidate: Candidate,
    source: nn.Module,
    pattern: re.Pattern[str] | None,
    factor: float,
    advance: Callable[[int], None],
    device: torch.device,
) -> Report:
    """Compare the candidate's recording with the golden; `source`: the golden's model, rounded in place."""
    theirs = candidate.golden
    assert theirs is not None, "called for recordings alone"
    if theirs.detail != "full":
        raise PorterError(f"{theirs.path}: recorded as {theirs.detail}; only --detail full holds what a replay needs")
    dtype = dtype_of(theirs.manifest["dtype"] or "float32")
    rounded = round_to(source, dtype)
    names = list(dict.fromkeys(record.module for record in theirs.records))
    pairing = pair_modules(golden, names, candidate.correspondence)
    replayer = RecordedReplayer(Recorded(theirs, dtype, device), pairing, source, source, factor, rounded)
    replayer.recorded.recorded_dtype = dtype
    ends = EndToEnd(golden, theirs, pairing)
    found = _Found(Report("aligned"), replayer, ends, [Skipped("", why) for why in ends.reasons])
    siblings = Siblings()
    for pair in pairing.pairs:
        advance(1)
        if pattern is not None and not pattern.search(pair.module):
            found.skipped.append(Skipped(pair.module, "not selected by --modules"))
            continue
        result = replayer.replay(pair)
        siblings.add(result)
        found.take(result)
        _count(result, found.counts)
    for result in siblings.tightened(replayer.replay, pairing.by_module):
        found.retake(result)
    report, drifts, counts = found.report, found.drifts, found.counts
    covered = coverage(source, pairing, found.compared, None, found.skipped)
    report.modules.sort(key=lambda row: (row.step, pairing.by_module[row.module].position))
    report.verdict, report.first_drift, report.coverage = verdict_of(drifts, covered), first_of(drifts), covered
    report.tokens = ends.tokens()
    report.routing = Routing(*counts) if counts[0] else None
    report.unmatched = {
        "golden": list(pairing.unmatched_golden),
        "candidate": list(pairing.unmatched_candidate),
    }
    report.environment = {
        "golden": {"dtype": golden.manifest["dtype"], **golden.manifest.get("environment", {})},
        "candidate": dict(candidate.environment),
    }
    return report


@dataclass
class _Found:
    """What the replay gathers."""

    report: Report
    replayer: RecordedReplayer
    ends: EndToEnd
    skipped: list[Skipped]
    drifts: list[Drifted] = field(default_factory=list)
    compared: set[str] = field(default_factory=set)
    counts: list[int] = field(default_factory=lambda: [0, 0, 0])

    def take(self, result: ModuleResult) -> None:
        """The rows, drifts and causes of one module."""
        self.report.modules += self.ends.joined(result.pair, list(rows_of(result, None)))
        self.drifts += drifts_of(result)
        if result.drifted and len({drifted.drift.module for drifted in self.drifts}) <= CAUSES_FOR:
            drift = drift_of(self.replayer, result, ())
            # What was recorded cannot be run again: there is no candidate module to try.
            if drift is not None:
                self.report.causes += explain(replace(drift, candidate_module=None, run_candidate=None))
        if result.compared:
            self.compared.update(result.pair.sources)
        else:
            self.skipped.append(Skipped(result.pair.module, result.why))
        self.skipped += self.replayer.taken()

    def retake(self, result: ModuleResult) -> None:
        """A module again, which stood out among its siblings."""
        self.report.modules = [row for row in self.report.modules if row.module != result.pair.module]
        self.take(result)


def _count(result: ModuleResult, counts: list[int]) -> None:
    for flips in result.flips:
        if flips is not None:
            counts[0] += flips.flipped.numel()
            counts[1] += int(flips.flipped.sum())
            counts[2] += int(flips.benign.sum())
