"""The alignment of two recordings: replay on the candidate's records, end to end where both saw the same tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from porter.alignment.calls import Recorded
from porter.alignment.candidate import Candidate
from porter.alignment.diagnosis import drift_of
from porter.alignment.hypotheses.catalogue import explain
from porter.alignment.lanes import real
from porter.alignment.module_result import ModuleResult
from porter.alignment.observation import first_tensor, relative
from porter.alignment.pairing import Pair, Pairing, pair_modules
from porter.alignment.recorded_candidate import RecordedReplayer
from porter.alignment.report import ModuleRow, Report, Routing, Skipped, Tokens
from porter.alignment.rows import drifts_of, rows_of
from porter.alignment.siblings import Siblings
from porter.alignment.tokens import TokenCount
from porter.alignment.verdict import Drifted, coverage, first_of, verdict_of
from porter.errors import PorterError
from porter.golden.format import dtype_of
from porter.golden.store import Golden

CAUSES_FOR = 3
"""How many drifting modules are diagnosed."""

KEPT_WIDE = 1 << 22
"""Elements of the largest parameter that a port may keep wider than its dtype: norms, biases, routers."""


def align_recorded(
    golden: Golden,
    candidate: Candidate,
    source: nn.Module,
    pattern: re.Pattern[str] | None,
    factor: float,
    advance: Callable[[int], None],
) -> Report:
    """Compare the candidate's recording with the golden; `source` is the golden's model, and is rounded in place."""
    theirs = candidate.golden
    assert theirs is not None, "called for recordings alone"
    if theirs.detail != "full":
        raise PorterError(f"{theirs.path}: recorded as {theirs.detail}; only --detail full holds what a replay needs")
    dtype = dtype_of(theirs.manifest["dtype"] or "float32")
    wide = _round_to(source, dtype)
    names = list(dict.fromkeys(record.module for record in theirs.records))
    pairing = pair_modules(golden, names, candidate.correspondence)
    replayer = RecordedReplayer(Recorded(theirs, dtype, torch.device("cpu")), pairing, source, source, factor, wide)
    replayer.recorded.recorded_dtype = dtype
    ends = _EndToEnd(golden, theirs, pairing)
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
    ends: _EndToEnd
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

    def retake(self, result: ModuleResult) -> None:
        """A module again, which stood out among its siblings."""
        self.report.modules = [row for row in self.report.modules if row.module != result.pair.module]
        self.take(result)


def _round_to(source: nn.Module, dtype: torch.dtype) -> dict[int, Tensor]:
    """What the candidate's precision does to the weights is no fault of its modules.

    Returns those that may be kept wider, unrounded, by the identity of what took their place.
    """
    wide = {}
    for module in source.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and torch.finfo(parameter.dtype).eps < torch.finfo(dtype).eps:
                rounded = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                module._parameters[name] = rounded
                if parameter.numel() <= KEPT_WIDE:
                    wide[id(rounded)] = parameter.detach()
    return wide


def _count(result: ModuleResult, counts: list[int]) -> None:
    for flips in result.flips:
        if flips is not None:
            counts[0] += flips.flipped.numel()
            counts[1] += int(flips.flipped.sum())
            counts[2] += int(flips.benign.sum())


class _EndToEnd:
    """Outputs of the two recordings against each other, over the steps at which both were given the same tokens."""

    def __init__(self, golden: Golden, candidate: Golden, pairing: Pairing) -> None:
        self._pairing = pairing
        self._golden = Recorded(golden, torch.float32, torch.device("cpu"))
        self._candidate = Recorded(candidate, torch.float32, torch.device("cpu"))
        self.reasons: list[str] = []
        self._steps = self._common_steps()

    def _common_steps(self) -> set[int]:
        mine, theirs = self._candidate.records.get("", []), self._golden.records.get("", [])
        steps: set[int] = set()
        diverged: set[int] = set()
        for one, other in zip(mine, theirs, strict=False):
            a, b = (_tensor(r.golden.value(x.inputs)) for r, x in ((self._candidate, one), (self._golden, other)))
            if (
                a is not None
                and b is not None
                and a.shape == b.shape
                and torch.equal(a, b)
                and one.batch not in diverged
            ):
                steps.add(one.step)
            else:
                diverged.add(one.batch)
        if diverged or len(mine) != len(theirs) or not steps:
            total = max(len(mine), len(theirs))
            self.reasons.append(f"end to end: {total - len(steps)} of {total} steps were given other tokens")
        return steps

    def joined(self, pair: Pair, rows: list[ModuleRow]) -> list[ModuleRow]:
        """The rows with their end-to-end error."""
        return [replace(row, end_to_end=self._error(pair, row.step)) for row in rows]

    def _error(self, pair: Pair, step: int) -> float | None:
        if step not in self._steps:
            return None
        mine = self._candidate.at(pair.module, step, 0)
        theirs = [self._golden.at(source, step, 0) for source in pair.sources]
        if mine is None or any(record is None for record in theirs):
            return None
        a = _tensor(self._candidate.golden.value(mine.outputs))
        parts = [_tensor(self._golden.golden.value(record.outputs)) for record in theirs if record is not None]
        known = [part for part in parts if part is not None]
        if a is None or len(known) != len(parts) or not a.is_floating_point():
            return None
        b = self._pairing.correspondence.output(pair.module, known)
        keep = self._candidate.keep(mine)
        return relative(a if keep is None else real(a, keep), b if keep is None else real(b, keep))

    def tokens(self) -> Tokens | None:
        """The logits of the two roots against each other."""
        count = TokenCount()
        for step in sorted(self._steps):
            pair = [(r, r.at("", step, 0)) for r in (self._candidate, self._golden)]
            logits = [_logits(r.golden.value(record.outputs)) for r, record in pair if record is not None]
            if len(logits) != 2 or logits[0] is None or logits[1] is None or logits[0].shape != logits[1].shape:
                continue
            record = pair[0][1]
            keep = None if record is None else self._candidate.keep(record)
            rows = [t if keep is None else real(t, keep) for t in logits if t is not None]
            count.add(*(row.reshape(-1, row.shape[-1]) for row in rows))
        return count.result()


def _tensor(value: object) -> Tensor | None:
    return first_tensor(list(value.values()) if isinstance(value, dict) else value)


def _logits(value: object) -> Tensor | None:
    logits = getattr(value, "logits", None)
    return logits if isinstance(logits, Tensor) and logits.dim() == 3 else None
