"""Faults of state: modules that are right on golden inputs and wrong where the model runs free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from porter.alignment.diagnosis import drift_of
from porter.alignment.free_replay import FreeReplayer, free_replays
from porter.alignment.free_watch import FreeErrors, Key
from porter.alignment.model_call import CannotRun
from porter.alignment.module_result import ModuleResult
from porter.alignment.pairing import Pair
from porter.alignment.replay import Replayer
from porter.alignment.report import Cause, FirstDrift
from porter.alignment.rows import findings
from porter.alignment.verdict import Drifted
from porter.errors import PorterError

LOOKED_INTO = 12
"""How many suspect modules are replayed on the candidate's own inputs, first in execution order."""
CAUSES_FOR = 2
NOT_REPLAYED_THERE = "free run: not compared on what the candidate gave it there"

Fault = tuple[Drifted, dict[str, Any]]
"""The drift, and what changes in the module's row."""


class StateFaults:
    """Proves or clears suspects; afterwards `faults` holds what is proved, `causes` what explains it."""

    def __init__(self, replayer: Replayer, pairs: dict[str, Pair], free: FreeErrors) -> None:
        self._replayer = replayer
        self._pairs = pairs
        self._free = free
        self.faults: dict[Key, Fault] = {}
        self.causes: list[Cause] = []

    def judge(self, suspects: Sequence[Key], known: Sequence[Drifted]) -> set[Key] | None:
        """The suspects, of those given, that could be judged; None where none could, or a known drift comes first."""
        first = min((drifted.position for drifted in known), default=None)
        open_ = [key for key in suspects if first is None or self._position(key) < first]
        if not open_:
            return None
        self._judge_handed(open_)
        chosen = list(dict.fromkeys(module for module, _ in open_))[:LOOKED_INTO]
        pairs = [self._pairs[name] for name in dict.fromkeys([*chosen, *map(self._above, chosen)]) if name is not None]
        try:
            with free_replays(self._replayer, pairs) as (own, results):
                for result in results:
                    self._judge(own, result, first)
        except (PorterError, CannotRun) as error:
            for pair in pairs:
                self._replayer.refuse(pair.module, f"{NOT_REPLAYED_THERE}: {error}")
            return None
        for result in results:
            if not result.compared:
                self._replayer.refuse(result.pair.module, f"{NOT_REPLAYED_THERE}: {result.why}")
        self._replayer.refused += own.taken()
        compared = {(r.pair.module, call.step) for r in results if r.compared for call in r.calls}
        return compared | {key for key in open_ if key[0] not in chosen and compared}

    def _judge(self, own: FreeReplayer, result: ModuleResult, first: tuple[int, int] | None) -> None:
        pair = result.pair
        drifted = [finding for finding in findings(result) if finding.drifted]
        steps = {call.step for call in result.calls}
        for finding in drifted:
            position = (finding.step, pair.position)
            if (first is not None and position >= first) or finding.shown is None:
                continue
            key = (pair.module, finding.step)
            changed = {
                "status": "drift",
                "introduced": finding.shown.error,
                "budget": finding.shown.budget,
                "cosine": finding.cosine,
                "why": self._words(own, pair, drifted[0].step, steps),
            }
            drift = Drifted(position, FirstDrift(pair.module, pair.source, finding.step, finding.shown.label))
            self.faults.setdefault(key, (drift, changed))
        if drifted and len({cause.module for cause in self.causes}) < CAUSES_FOR:
            self.causes += self._causes(own, result)

    def _words(self, own: FreeReplayer, pair: Pair, step: int, steps: set[int]) -> str:
        holder = own.fills_cache(pair) and pair.module in own.recorded.records
        early = step == min(steps)
        where = "its cache" if holder and not early else "a buffer, mask or cache that calls share"
        when = "from the prefill on" if early else f"appears at step {step}"
        return f"fault of state: not in any module on golden inputs, {when} in the free run ({where})"

    def _causes(self, own: FreeReplayer, result: ModuleResult) -> list[Cause]:
        from porter.alignment.hypotheses.catalogue import explain

        drift = drift_of(own, result, ())
        # Alone the candidate's module is right: what it did in the free run cannot be had from it again.
        return [] if drift is None else explain(replace(drift, candidate_module=None, run_candidate=None))

    def _judge_handed(self, suspects: Sequence[Key]) -> None:
        """Positions and masks other than the golden's are a fault of the module that hands them on, unless it was
        handed them itself."""
        for module, step in suspects:
            above = self._above(module)
            if above is None:
                continue
            given = {other.argument for other in self._free.handed.get((above, step), ())}
            own = [other for other in self._free.handed.get((module, step), ()) if other.argument not in given]
            if not own or (above, step) in self.faults:
                continue
            pair, child = self._pairs[above], module.removeprefix(f"{above}.")
            drift = FirstDrift(above, pair.source, step, f"{child}.{own[0].argument}")
            changed = {
                "status": "drift",
                "introduced": own[0].differ / own[0].of,
                "budget": 0.0,
                "why": f"fault of state: hands {child} the wrong {own[0].words}",
            }
            # It shows first where it arrives: the module above returns later.
            self.faults[above, step] = (Drifted((step, self._pairs[module].position), drift), changed)

    def _position(self, key: Key) -> tuple[int, int]:
        return key[1], self._pairs[key[0]].position

    def _above(self, module: str) -> str | None:
        """The nearest paired module around one; None for the root."""
        while module:
            module = module.rpartition(".")[0]
            if module in self._pairs:
                return module
        return None
