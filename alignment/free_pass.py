"""What the free run adds to the report: end-to-end and inherited errors, tokens, and faults of state."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from porter.alignment.budget import least
from porter.alignment.candidate import compute_dtype
from porter.alignment.free_run import FreeErrors, Key, exact_baseline, limit, rounded_baseline, run_whole, sketch_of
from porter.alignment.module_result import ModuleResult
from porter.alignment.pairing import Pair
from porter.alignment.replay import CANNOT_RUN, Replayer
from porter.alignment.report import FirstDrift, ModuleRow, Skipped, Tokens
from porter.alignment.verdict import Drifted
from porter.errors import PorterError

SLACK = 4.0
"""Times the factor: how far beyond the source's own growth of rounding a free error must be to be no rounding. Another
rounding takes another path through the model, so single modules differ by 2 or 3 where the model is chaotic."""

STATE = "only in the free run: state that calls share (cache, mask, positions, buffers), not this module's mathematics"


class FreePass:
    """Runs candidate and source whole and joins what they show to the rows of the replay."""

    def __init__(self, replayer: Replayer, pairs: dict[str, Pair]) -> None:
        self._replayer = replayer
        self._pairs = pairs
        self._replayed: dict[Key, Tensor] = {}
        self.skipped: list[Skipped] = []
        self.tokens: Tokens | None = None
        self._free = FreeErrors()
        self._baselines: list[FreeErrors] = []
        self.unjudged = False
        """Whether the free run failed, or has no measured limit though the source is there: nothing is aligned then."""

    def remember(self, result: ModuleResult) -> None:
        """Keep a sketch of what a module gave in the replay."""
        for call, seen in zip(result.calls, result.candidate_native, strict=False):
            tensor = seen.tensors.get("output")
            if tensor is not None:
                self._replayed.setdefault((result.pair.module, call.step), sketch_of(tensor))

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
        except CANNOT_RUN as error:
            self.unjudged = True
            self.skipped.append(Skipped("", f"free run: the candidate fails: {type(error).__name__}: {error}"))
            return False
        self.tokens = self._free.tokens.result()
        if replayer.source is not None:
            self._measure_growth()
        return True

    def _measure_growth(self) -> None:
        """Run the source whole, rounded and exactly; either run alone gives a limit."""
        failures = []
        for baseline in (rounded_baseline, exact_baseline):
            try:
                self._baselines.append(baseline(self._replayer, self._pairs))
            except CANNOT_RUN as error:
                failures.append(f"{type(error).__name__}: {error}")
        self.unjudged = not self._baselines
        if self.unjudged:
            self.skipped.append(Skipped("", f"free run: no limit, the source fails: {'; '.join(failures)}"))

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
        found, faults = [], []
        known = list(drifts)
        keys = sorted({*by_key, *self._free.end_to_end}, key=lambda key: (key[1], self._pairs[key[0]].position))
        for key in keys:
            pair = self._pairs[key[0]]
            row = by_key.get(key) or ModuleRow(pair.module, pair.source, key[1])
            error = self._free.end_to_end.get(key)
            if error is None:
                found.append(row)
                continue
            row = replace(row, end_to_end=error, inherited=self._inherited(key))
            allowed = self._limit(key)
            if allowed is not None and not error <= allowed and row.status != "drift":
                position = (key[1], pair.position)
                if any(explains(drifted, pair, position) for drifted in known):
                    row = replace(row, status="inherited")
                else:
                    known.append(Drifted(position, FirstDrift(pair.module, pair.source, key[1], "output")))
                    faults.append(known[-1])
                    row = replace(row, status="drift", introduced=error, budget=allowed, why=STATE)
            found.append(row)
        return found, faults

    def _limit(self, key: Key) -> float | None:
        if not self._baselines:
            return None
        # A router that returns float32 still inherits the rounding of the activations that it is given.
        coarser = max(self._free.dtypes[key], compute_dtype(self._replayer.candidate), key=least)
        return limit(self._baselines, key, coarser, SLACK * self._replayer.factor)

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
