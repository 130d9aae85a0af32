"""The replay pass as `align` runs it: every pair, then the outliers among siblings, settled one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from porter.alignment.diagnosis import drift_of
from porter.alignment.findings import Findings
from porter.alignment.forced_children import unforced_children
from porter.alignment.free_pass import FreePass
from porter.alignment.journal import Journal
from porter.alignment.module_result import ModuleResult
from porter.alignment.pairing import Pair
from porter.alignment.replay import Replayer, replay_all
from porter.alignment.report import Cause, ModuleRow
from porter.alignment.rows import drifts_of, rows_of
from porter.alignment.settled import Settled, settled
from porter.alignment.siblings import Siblings
from porter.alignment.streaming import reach, release

CAUSES_FOR = 3
"""How many drifting modules are diagnosed, first in execution order: what follows is seldom another fault."""


@dataclass
class ReplayPass:
    """Replays pairs and adds what they show to `findings`; the free run is told what each module gave."""

    findings: Findings
    replayer: Replayer
    free: FreePass
    _diagnosed: int = 0
    _siblings: Siblings = field(default_factory=Siblings)

    def run(self, pairs: Sequence[Pair], advance: Callable[[int], None], journal: Journal | None = None) -> None:
        """Replay `pairs`; those that the journal knows are taken from it, the others are entered into it."""
        known = [] if journal is None else journal.resumed(pairs, self.replayer.recorded.device)
        for kept in known:
            kept.remind(self.replayer.recorded)
            self._take(kept)
            advance(1)
        for result in replay_all(self.replayer, self._reached(pairs[len(known) :]), advance):
            kept = self._settled(result)
            self._take(kept)
            if journal is not None:
                journal.enter(kept)
        for result in self._siblings.tightened(self._again, self.replayer.pairing.by_module):
            self._take_anew(result)
        release(self.replayer.candidate, self.replayer.source)

    def _again(self, pair: Pair) -> ModuleResult:
        return self.replayer.replay(next(self._reached([pair])))

    def _take_anew(self, result: ModuleResult) -> None:
        """A module that stands out among its siblings, in place of what was taken of it before."""
        module, rows = result.pair.module, self.findings.rows
        before = {row.step: row for row in rows if row.module == module}
        self.findings.rows = [row for row in rows if row.module != module]
        result.flips = []
        kept = self._settled(result)
        served = [replace(row, op=before[row.step].op, provider=before[row.step].provider) for row in kept.rows]
        self._take(replace(kept, rows=served))

    def _take(self, kept: Settled) -> None:
        self._diagnosed += kept.explicable
        self._siblings.add(kept)
        self.findings.take(kept)
        self.free.remember(kept.pair.module, kept.sketches)

    def _settled(self, result: ModuleResult) -> Settled:
        rows: list[ModuleRow] = list(rows_of(result, self.replayer.candidate.get_submodule(result.pair.module)))
        drifts = drifts_of(result)
        if result.drifted and self._brought_by_a_child(result):
            rows = [replace(row, status="inherited") if row.status == "drift" else row for row in rows]
            drifts = []
        kept = settled(result, self.replayer.recorded, rows, drifts)
        causes = self._causes(kept, result)
        return replace(kept, causes=causes, refused=self.replayer.taken())

    def _brought_by_a_child(self, result: ModuleResult) -> bool:
        """Whether a child that ran within this module's replay is itself over its budget."""
        drifted = {drifted.drift.module for drifted in self.findings.drifts}
        return bool(drifted & unforced_children(self.replayer.pairing, result))

    def _causes(self, kept: Settled, result: ModuleResult) -> list[Cause]:
        from porter.alignment.hypotheses.catalogue import explain

        if not kept.explicable or self._diagnosed >= CAUSES_FOR:
            return []
        drift = drift_of(self.replayer, result, self.findings.weights)
        return [] if drift is None else explain(drift)

    def _reached(self, pairs: Sequence[Pair]) -> Iterator[Pair]:
        """The pairs one by one, of models that are streamed with the part around each in memory."""
        for pair in pairs:
            reach(self.replayer.candidate, pair.module)
            reach(self.replayer.source, pair.sources[0])
            yield pair
