"""Running source and candidate in one regime, and whether the candidate fails there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from porter.alignment.budget import least
from porter.alignment.calls import Recorded
from porter.alignment.candidate import compute_dtype
from porter.alignment.free_pass import SLACK
from porter.alignment.free_run import BASELINES, run_whole
from porter.alignment.model_call import CannotRun
from porter.alignment.observation import relative
from porter.alignment.pairing import Pair, Pairing, module_names, pair_modules, selection
from porter.alignment.precision_swap import exact, swapped
from porter.alignment.regimes import Regime, run_steps, steps
from porter.alignment.replay import Replayer
from porter.alignment.report import Report, Skipped
from porter.alignment.routing import choice_of
from porter.alignment.sweep_outcome import Loads, Outcome, of_report
from porter.correspondence import Correspondence
from porter.errors import PorterError
from porter.golden.recorder import recording
from porter.golden.store import Golden

FREE, REPLAY, ALIGN = "free", "replay", "align"
RAISES = "the candidate raises"


class SourceCannotRun(Exception):
    """The source itself raises in this regime: there is nothing to compare with."""


@dataclass
class Prober:
    """Judges regimes; `source` must hold the candidate's weights where these are in order (as `align` leaves it).

    `stored` are the dtypes that the source's tensors were recorded in, by name: recordings are made in these. `probes`
    is how many tensors the whole sweep judges, or more.
    """

    model: nn.Module
    source: nn.Module
    correspondence: Correspondence
    stored: dict[str, torch.dtype]
    tokens: Tensor
    factor: float
    probes: int
    device: torch.device
    modules: str | None = None
    advance: Callable[[int], None] = lambda amount: None
    loads: Loads = field(default_factory=Loads)
    tried: list[Outcome] = field(default_factory=list)
    not_tried: dict[Regime, str] = field(default_factory=dict)
    unmeasured: list[Skipped] = field(default_factory=list)
    runs: int = 0
    _reports: dict[Regime, Report] = field(default_factory=dict)
    _known: dict[tuple[Regime, Any], Outcome] = field(default_factory=dict)

    @contextmanager
    def recorded(self, regime: Regime) -> Iterator[Golden]:
        """A golden of the source in that regime, there as long as the block runs. SourceCannotRun if it raises."""
        with tempfile.TemporaryDirectory(prefix="porter-sweep-") as folder:
            path = Path(folder) / "golden"
            try:
                with self._as_stored(), self._counting(), recording(self.source, path, store_weights=False):
                    run_steps(self.source, steps(regime, self.tokens))
            except (CannotRun, PorterError) as error:
                raise SourceCannotRun(str(error)) from error
            self.runs += 1
            self.advance(1)
            yield Golden.open(path)

    def free(self, regime: Regime) -> Outcome | None:
        """Whether the candidate, run whole, is further from the source than rounding takes it; None: cannot be told."""
        return self._judged(regime, FREE, lambda golden: self._free(regime, self._replayer(golden)))

    def raises(self, regime: Regime) -> Outcome | None:
        """Whether the candidate, run whole, raises."""
        outcome = self.free(regime)
        return outcome if outcome is None or outcome.why.startswith(RAISES) else replace(outcome, failing=False)

    def replayed(self, regime: Regime, modules: frozenset[str]) -> Outcome | None:
        """Whether one of `modules`, on the source's inputs, is over its budget; None: cannot be told."""
        return self._judged(regime, modules, lambda golden: _replay(regime, self._replayer(golden), modules))

    def aligned(self, regime: Regime) -> Outcome | None:
        """Whether an alignment in that regime finds a drift; None: cannot be told."""
        return self._judged(regime, ALIGN, lambda golden: self._aligned(regime, golden, ALIGN))

    def replayed_whole(self, regime: Regime) -> Outcome | None:
        """Whether any module, on the source's inputs, is over its budget; None: cannot be told."""
        return self._judged(regime, REPLAY, lambda golden: self._aligned(regime, golden, REPLAY))

    def report(self, regime: Regime) -> Report | None:
        """The alignment in that regime; None where the source cannot run it."""
        self.aligned(regime)
        return self._reports.get(regime)

    def _aligned(self, regime: Regime, golden: Golden, judge: str) -> Outcome:
        from porter.alignment.align import align

        report = align(
            golden,
            self.model,
            passes="replay" if judge == REPLAY else "all",
            modules=self.modules,
            factor=self.factor,
            correspondence=self.correspondence,
            device=self.device,
            source=self.source,
            probes=self.probes,
        )
        if judge == ALIGN:
            self._reports[regime] = report
        return of_report(regime, judge, report)

    def _judged(self, regime: Regime, judge: Any, judged: Callable[[Golden], Outcome]) -> Outcome | None:
        if regime in self.not_tried:
            return None
        found = self._known.get((regime, judge))
        if found is None:
            try:
                with self.recorded(regime) as golden:
                    found = judged(golden)
            except SourceCannotRun as error:
                self.not_tried[regime] = f"the source cannot run it: {error}"
                return None
            self._known[regime, judge] = found
            self.tried.append(found)
        return found

    def _replayer(self, golden: Golden) -> Replayer:
        pairing = pair_modules(golden, module_names(self.model), self.correspondence)
        recorded = Recorded(golden, compute_dtype(self.model), self.device)
        return Replayer(recorded, pairing, self.model, self.source, self.factor, probes=self.probes)

    def _free(self, regime: Regime, replayer: Replayer) -> Outcome:
        """Whole runs, the baselines only as far as they are needed: each can only raise the limits."""
        pattern = selection(self.modules)
        pairs = {p.module: p for p in replayer.pairing.pairs if pattern is None or pattern.search(p.module)}
        try:
            found = run_whole(self.model, replayer.recorded, pairs, replayer.pairing, lambda pair: (pair.module,))
        except (CannotRun, PorterError) as error:
            return Outcome(regime, FREE, True, why=f"{RAISES} {error}")
        if found.handed:
            first = min(found.handed, key=lambda key: (key[1], pairs[key[0]].position))
            return Outcome(regime, FREE, True, first[0], why="is handed other positions or another mask")
        limits = {
            key: SLACK * self.factor * least(max(dtype, compute_dtype(self.model), key=least))
            for key, dtype in found.dtypes.items()
        }
        for how, baseline in ((None, None), *BASELINES.items()):
            if baseline is not None:
                try:
                    measured = baseline(replayer, pairs)
                except CannotRun as error:
                    why = f"sweep: {regime.says()}: the source fails {how}, which would show rounding: {error}"
                    self.unmeasured.append(Skipped("", why))
                    continue
                for key, grown in measured.end_to_end.items():
                    limits[key] = max(limits.get(key, 0.0), SLACK * self.factor * grown)
            over = [key for key, error in found.end_to_end.items() if not error <= limits[key]]
            if not over:
                return Outcome(regime, FREE, False)
        first = min(over, key=lambda key: (key[1], pairs[key[0]].position))
        return Outcome(regime, FREE, True, first[0], found.end_to_end[first], limits[first])

    @contextmanager
    def _as_stored(self) -> Iterator[None]:
        """The source in the dtypes that it was recorded in: weights taken from a quantized candidate have others."""
        known = {**dict(self.source.named_parameters()), **dict(self.source.named_buffers())}
        dtypes = {id(tensor): self.stored.get(name, tensor.dtype) for name, tensor in known.items()}
        with swapped(self.source, lambda tensor: tensor.to(dtypes.get(id(tensor), tensor.dtype))):
            yield

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Count the tokens that each expert of the source gets."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            choice, _ = choice_of(module, output)
            if choice is not None:
                self.loads.add(choice.sets().sum(dim=0))

        handles = [module.register_forward_hook(hook) for module in self.source.modules()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def stored_dtypes(source: nn.Module) -> dict[str, torch.dtype]:
    """The dtypes of the source's tensors by every name that they have: tied ones may be untied later."""
    known = (*source.named_parameters(remove_duplicate=False), *source.named_buffers(remove_duplicate=False))
    return {name: tensor.dtype for name, tensor in known}


def _replay(regime: Regime, replayer: Replayer, modules: frozenset[str]) -> Outcome:
    for pair in beside(replayer.pairing, modules):
        result = replayer.replay(pair)
        if pair.module in modules and (result.drifted or result.failed):
            found = [v for v in (*result.exact, *result.native) if v is not None and v.over]
            worst = max(found, key=lambda verdict: verdict.ratio, default=None)
            error, limit = (None, None) if worst is None else (worst.error, worst.budget)
            return Outcome(regime, REPLAY, True, pair.module, error, limit, result.why)
    return Outcome(regime, REPLAY, False)


def beside(pairing: Pairing, modules: frozenset[str]) -> list[Pair]:
    """The pairs of `modules` in execution order, and their siblings, whose replay tells the dtypes of their inputs."""
    parents = {name.rpartition(".")[0] for name in modules}
    found = [p for p in pairing.pairs if p.module in modules or p.module.rpartition(".")[0] in parents]
    last = max((place for place, pair in enumerate(found) if pair.module in modules), default=-1)
    return found[: last + 1]


def source_is_consistent(source: nn.Module, regime: Regime, tokens: Tensor) -> float:
    """How far, in float64, the source's last logits in `regime` are from those of one prefill of the same tokens.

    Raises CannotRun.
    """
    ends: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        ends.append(output.logits[:, -1].detach().clone())

    handle = source.register_forward_hook(hook)
    try:
        with exact(source):
            run_steps(source, steps(regime, tokens))
            run_steps(source, steps(Regime(regime.length, batch=regime.batch), tokens))
            return relative(ends[len(steps(regime, tokens)) - 1], ends[-1])
    finally:
        handle.remove()
