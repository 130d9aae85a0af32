"""What the free run adds to the report: end-to-end and inherited errors, tokens, and faults of state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from porter.alignment.budget import least
from porter.alignment.candidate import compute_dtype
from porter.alignment.free_run import BASELINES, FreeErrors, Key, limit, predicted, run_whole
from porter.alignment.model_call import CannotRun
from porter.alignment.pairing import Pair
from porter.alignment.replay import Replayer
from porter.alignment.report import Cause, FirstDrift, ModuleRow, Skipped, Tokens
from porter.alignment.state_faults import StateFaults
from porter.alignment.verdict import Drifted
from porter.errors import PorterError

SLACK = 4.0
"""Times the factor: how far beyond the source's own growth of rounding a free error must be to be no rounding, where
the module cannot be replayed on the candidate's own inputs. Another rounding takes another path through the model, so
single modules differ by 2 or 3 where the model is chaotic."""

SUSPECT = 1.5
"""Times the factor: how far beyond its prediction a free error must be for the module to be looked into."""

STATE = "only in the free run: state that calls share (cache, mask, positions, buffers), not this module's mathematics"
NOT_FINITE = "not finite in the free run"
AMPLIFIED = "far off in the free run, yet right on what it was given there: rounding that grew, no fault"


class FreePass:
    """Runs candidate and source whole and joins what they show to the rows of the replay."""

    def __init__(self, replayer: Replayer, pairs: dict[str, Pair]) -> None:
        self._replayer = replayer
        self._pairs = pairs
        self._replayed: dict[Key, Tensor] = {}
        self.skipped: list[Skipped] = []
        self.causes: list[Cause] = []
        self.tokens: Tokens | None = None
        self._free = FreeErrors()
        self._baselines: list[FreeErrors] = []
        self.unjudged = False
        """Whether the free run failed, or has no measured limit though the source is there: nothing is aligned then."""

    def remember(self, module: str, sketches: Mapping[int, Tensor]) -> None:
        """Keep the sketches, by step, of what a module gave in the replay."""
        for step, sketch in sketches.items():
            self._replayed.setdefault((module, step), sketch)

    def run(self) -> bool:
        """Run both; False, with the reason in `skipped`, where the candidate cannot be run whole."""
        replayer = self._replayer
        if "" not in replayer.recorded.records:
            self.skipped.append(Skipped("", "free run: the golden has no record of the whole model"))
            return False
        try:
            self._free = run_whole(
                replayer.candidate, replayer.recorded, self._pairs, replayer.pairing, lambda pair: (pair.module,)
            )
        except PorterError as error:
            self.unjudged = True
            self.skipped.append(Skipped("", f"free run: {error}"))
            return False
        except CannotRun as error:
            self.unjudged = True
            self.skipped.append(Skipped("", f"free run: the candidate fails: {error}"))
            return False
        self.tokens = self._free.tokens.result()
        if replayer.source is not None:
            self._measure_growth()
        return True

    def _measure_growth(self) -> None:
        """Run the source whole, rounded and exactly; either run alone gives a limit."""
        for how, baseline in BASELINES.items():
            try:
                self._baselines.append(baseline(self._replayer, self._pairs))
            except CannotRun as error:
                why = f"free run: the source fails {how}, which would show rounding: {error}"
                self.skipped.append(Skipped("", why))
        self.unjudged = not self._baselines

    @property
    def replays_nothing(self) -> bool:
        """Whether the golden holds too little for a replay, so that the free run is all there is."""
        return self._replayer.recorded.golden.detail != "full"

    @property
    def compared(self) -> set[str]:
        """Modules whose output the free run compared."""
        return {module for module, _ in self._free.end_to_end}

    def joined(self, rows: list[ModuleRow], drifts: list[Drifted]) -> tuple[list[ModuleRow], list[Drifted]]:
        """The rows with what the free run showed, and the drifts that only it shows."""
        by_key = {(row.module, row.step): row for row in rows}
        for key, error in self._free.end_to_end.items():
            row = by_key.get(key) or ModuleRow(key[0], self._pairs[key[0]].source, key[1])
            by_key[key] = replace(row, end_to_end=error, inherited=self._inherited(key))
        known = list(drifts)
        state = StateFaults(self._replayer, self._pairs, self._free)
        suspects = [key for key in self._in_order(by_key) if self._suspect(by_key[key])]
        replayed = None if self.replays_nothing else state.judge(suspects, known)
        self.causes += state.causes
        self.skipped += self._replayer.taken()
        known += [drifted for drifted, _ in state.faults.values()]
        for key in self._in_order(by_key):
            if key in state.faults:
                by_key[key] = replace(by_key[key], **state.faults[key][1])
            elif key in suspects:
                by_key[key] = self._of_suspect(by_key[key], known, replayed)
        return [by_key[key] for key in self._in_order(by_key)], known[len(drifts) :]

    def _of_suspect(self, row: ModuleRow, known: list[Drifted], replayed: set[Key] | None) -> ModuleRow:
        """A suspect without a proven fault: it inherits, or rounding grew, or, where nothing could be proved, it is far
        beyond what rounding can do."""
        key = (row.module, row.step)
        position = (row.step, self._pairs[row.module].position)
        error, allowed = row.end_to_end or 0.0, self._limit(key)
        if any(explains(drifted, self._pairs[row.module], position) for drifted in known):
            return replace(row, status="inherited") if not error <= allowed else row
        if not math.isfinite(error) or (not error <= allowed and (replayed is None or key not in replayed)):
            known.append(Drifted(position, FirstDrift(row.module, row.source, row.step, "output")))
            why = STATE if math.isfinite(error) else NOT_FINITE
            return replace(row, status="drift", introduced=error, budget=allowed, why=why)
        return replace(row, why=row.why or AMPLIFIED) if not error <= allowed else row

    def _in_order(self, keys: dict[Key, ModuleRow]) -> list[Key]:
        return sorted(keys, key=lambda key: (key[1], self._pairs[key[0]].position))

    def _suspect(self, row: ModuleRow) -> bool:
        """Whether a free error is beyond its prediction and the replay found nothing."""
        key = (row.module, row.step)
        error = row.end_to_end
        if not self._baselines or error is None or row.status == "drift":
            return False
        if key in self._free.handed:
            return True
        expected = predicted(
            self._baselines, key, self._coarser(key), self._free.inputs.get(key), row.introduced or 0.0
        )
        return not error <= SUSPECT * self._replayer.factor * expected

    def _limit(self, key: Key) -> float:
        return limit(self._baselines, key, self._coarser(key), SLACK * self._replayer.factor)

    def _coarser(self, key: Key) -> torch.dtype:
        """A router that returns float32 still inherits the rounding of the activations that it is given."""
        return max(self._free.dtypes[key], compute_dtype(self._replayer.candidate), key=least)

    def _inherited(self, key: Key) -> float | None:
        replayed, free = self._replayed.get(key), self._free.sketches.get(key)
        if replayed is None or free is None or not free[1]:
            return None
        return float((free[0].to(torch.float64) - replayed.to(torch.float64)).norm()) / free[1]


def explains(drifted: Drifted, pair: Pair, position: tuple[int, int]) -> bool:
    """Whether a drift reaches a module: it happened before, or in a module around it, which began before."""
    around = drifted.drift.module
    inside = not around or pair.module.startswith(f"{around}.")
    return drifted.position <= position or (inside and drifted.drift.step <= position[0])
