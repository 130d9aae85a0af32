"""The replay pass: every module on golden inputs, in float64 against its source and in its own precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from porter.alignment.budget import EXACT, judged_exact, judged_native, measured
from porter.alignment.calls import Call, Recorded, source_module
from porter.alignment.comparable import comparable, no_less_than_typical
from porter.alignment.forced_children import force_alike, force_holding_weights
from porter.alignment.lanes import (
    Seen,
    Side,
    appends_to_cache,
    exactly,
    natively,
    position_scale,
    run_calls,
    skipped_children,
)
from porter.alignment.model_call import CannotRun
from porter.alignment.module_result import ModuleResult
from porter.alignment.observation import tensors
from porter.alignment.pairing import Pair, Pairing, relative_name
from porter.alignment.precision_swap import exact, swapped
from porter.alignment.quantization_cost import activation_cost, quantizes_activations, round_first, rounded_activations
from porter.alignment.recorded_truth import recorded_observations
from porter.alignment.report import Skipped
from porter.alignment.roundings import other_roundings
from porter.alignment.routing import Flips, flips, score_noise
from porter.alignment.states import judged_states
from porter.errors import PorterError

CANNOT_BE_CALLED = "the candidate cannot be called as recorded"
"""How the reason begins where the candidate's module raised."""

UNMEASURED = {False: 4, True: 8}
"""Roundings of the dtype that a module may add up to, per unit of the factor, where its noise cannot be measured; True:
a module of several, such as attention, whose scores may be rounded before the softmax makes their errors larger."""


@dataclass
class Replayer:
    """Replays pairs one by one; holds the two models, their golden and the settings."""

    recorded: Recorded
    pairing: Pairing
    candidate: nn.Module
    source: nn.Module | None
    factor: float
    probes: int = field(default=1, kw_only=True)
    """How many tensors are judged in all, of which this replay judges some."""
    refused: list[Skipped] = field(default_factory=list, init=False)
    """Modules of which something could not be run, and so was not compared; whoever asked for it takes them."""

    def refuse(self, module: str, why: str) -> str:
        """Note that something of `module` was not compared; returns `why`."""
        self.refused.append(Skipped(module, why))
        return why

    def taken(self) -> list[Skipped]:
        """What was refused since this was last asked."""
        found, self.refused = self.refused, []
        return list(dict.fromkeys(found))

    def replay(self, pair: Pair) -> ModuleResult:
        """Run the pair's lanes over every recorded call."""
        try:
            calls = self.recorded.calls(pair, self.pairing)
        except PorterError as error:
            return ModuleResult(pair, (), why=str(error))
        if not any(True for call in calls for _ in tensors([call.output], "")):
            return ModuleResult(pair, calls, why="its output holds no tensors")
        result = ModuleResult(pair, calls)
        mine, theirs = self.side(pair), self.source_side(pair)
        try:
            force_holding_weights(mine.module, self.pairing, result)
            result.candidate_native = run_calls(mine, result.calls, natively)
            if force_alike(self.pairing, result):
                result.candidate_native = run_calls(mine, result.calls, natively)
        except CannotRun as error:
            result.why, result.failed = f"{CANNOT_BE_CALLED}: {error}", True
            return result
        self.recorded.returns_tuple[pair.module] = isinstance(result.candidate_native[0].output, tuple)
        if theirs is None:
            self._against_golden(result)
        else:
            self._against_oracle(result, mine, theirs)
        return result

    def _against_oracle(self, result: ModuleResult, mine: Side, theirs: Side) -> None:
        calls = self._quantized(mine.module, result.calls)
        try:
            result.oracle = self.run_exact(theirs, calls)
            rounded = self.run_rounded(theirs, calls)
        except CannotRun as error:
            result.why = self.refuse(result.pair.module, f"the source cannot be replayed in float64: {error}")
            self._against_golden(result)
            return
        self._note_dtypes(result.pair, rounded)
        cost = activation_cost(mine.module, self, theirs, result)
        try:
            result.candidate_exact = self.run_exact(mine, result.calls)
        except CannotRun as error:
            why = f"cannot run in float64, judged in its own precision alone: {error}"
            result.why = self.refuse(result.pair.module, why)
        tolerance = EXACT * position_scale(result.calls)
        result.exact = [
            judged_exact(seen.tensors, oracle.tensors, cost, tolerance)
            for seen, oracle in zip(result.candidate_exact, result.oracle, strict=False)
        ]
        self.judge_native(result, theirs, calls, rounded, cost)

    def judge_native(
        self, result: ModuleResult, theirs: Side, calls: Sequence[Call], rounded: list[Seen], cost: float
    ) -> None:
        """Judge the native lane by the noise of the source as it is written; what that alone would call a drift, by
        the noise of the other legitimate roundings too."""
        self._judge_by(result, theirs.module, [rounded], cost)
        if not result.over_native:
            return
        samples = [rounded]
        for way in other_roundings():
            with way:
                samples.append(self.run_rounded(theirs, calls))
        self._judge_by(result, theirs.module, samples, cost)

    def _judge_by(
        self, result: ModuleResult, router: nn.Module, samples: Sequence[Sequence[Seen]], cost: float
    ) -> None:
        result.flips, views, noise = [], [], []
        for index, (seen, oracle) in enumerate(zip(result.candidate_native, result.oracle, strict=True)):
            ways = [sample[index] for sample in samples]
            flipped = self._flips(router, seen, oracle, ways)
            result.flips.append(flipped)
            views.append(comparable(seen, oracle, ways, flipped))
            noise.append(measured(views[-1][1], views[-1][2:]))
        if len(samples) > 1:
            noise = [no_less_than_typical(each, noise) for each in noise]
        result.tensors = [
            judged_native(mine, theirs, known, self.factor, cost, probes=self.probes)
            for (mine, theirs, *_), known in zip(views, noise, strict=True)
        ]
        for index, (seen, oracle) in enumerate(zip(result.candidate_native, result.oracle, strict=True)):
            kept = [sample[index].states for sample in samples]
            result.tensors[index] += judged_states(seen.states, oracle.states, kept, self.factor)
        result.native = [max(each, key=lambda verdict: verdict.ratio, default=None) for each in result.tensors]

    def _flips(self, router: nn.Module, seen: Seen, oracle: Seen, ways: Sequence[Seen]) -> Flips | None:
        if seen.choice is None or oracle.choice is None:
            return None
        noise = max(score_noise(router, way.choice, oracle.choice, self.factor) for way in ways)
        return flips(router, seen.choice, oracle.choice, noise)

    def _against_golden(self, result: ModuleResult) -> None:
        """Without an oracle the recorded output is the yardstick, and unit roundoff the only known noise."""
        result.why = result.why or "no float64 oracle: compared with the recorded output alone"
        factor = self.factor * UNMEASURED[bool(self.pairing.children(result.pair))]
        for seen, golden in zip(result.candidate_native, recorded_observations(self, result), strict=True):
            mine = {label: tensor for label, tensor in seen.tensors.items() if label in golden}
            result.tensors.append(judged_native(mine, golden, {}, factor, 0.0, self.recorded.recorded_dtype))
        result.native = [found[0] if found else None for found in result.tensors]

    def side(self, pair: Pair) -> Side:
        """The candidate's side of a pair."""
        module = self.candidate.get_submodule(pair.module)
        config = getattr(self.candidate, "config", getattr(self.source, "config", None))
        implementation = getattr(getattr(module, "config", config), "_attn_implementation", None)
        return Side(module, config, self.fills_cache(pair), False, {}, implementation == "eager")

    def source_side(self, pair: Pair) -> Side | None:
        """The source's side; None where there is no source model."""
        if self.source is None:
            return None
        labels = {}
        for child in self.pairing.children(pair):
            for source in child.sources:
                labels[relative_name(source, pair.sources[0])] = relative_name(child.module, pair.module)
        config = getattr(self.source, "config", None)
        eager = getattr(config, "_attn_implementation", None) == "eager"
        return Side(source_module(self.source, pair), config, self.fills_cache(pair), True, labels, eager)

    def run_exact(self, side: Side, calls: Sequence[Call]) -> list[Seen]:
        """One side in float64."""
        return run_calls(side, calls, exactly, exact(side.module, _left_alone(side, calls)))

    def run_rounded(self, side: Side, calls: Sequence[Call]) -> list[Seen]:
        """The source in the candidate's own precision: the noise that rounding makes on these inputs."""
        return run_calls(side, calls, self._natively, self.rounded(side.module, _left_alone(side, calls)))

    def rounded(self, module: nn.Module, leave: Sequence[nn.Module] = ()) -> AbstractContextManager[None]:
        """The source in the candidate's own precision while the context lasts."""
        kept = self._pinned()
        return swapped(module, lambda t: t if id(t) in kept else self._to_native(t), leave)

    def _pinned(self) -> set[int]:
        """The source's tensors that its class keeps in float32 whatever its dtype, and the candidate does as well."""
        source, eps = self.source, torch.finfo(self.recorded.dtype).eps
        pins = tuple(getattr(source, "_keep_in_fp32_modules_strict", None) or ())
        if source is None or not pins:
            return set()
        held = dict(source.named_parameters()) | dict(source.named_buffers())
        mine = [*self.candidate.named_parameters(), *self.candidate.named_buffers()]
        wide = [name for name, t in mine if t.is_floating_point() and torch.finfo(t.dtype).eps < eps]
        names = {source_name for name in wide for source_name in self.pairing.correspondence.source_of(name)}
        return {id(held[name]) for name in names & held.keys() if any(pin in name for pin in pins)}

    @contextmanager
    def rounding_activations(self, source: nn.Module) -> Iterator[None]:
        """The source's modules round their inputs to int8 levels where the candidate's scheme does."""
        handles = []
        try:
            for pair in self.pairing.pairs:
                candidate = self.candidate.get_submodule(pair.module)
                if quantizes_activations(candidate) is not None:
                    for name in pair.sources:
                        handles.append(source.get_submodule(name).register_forward_pre_hook(round_first(candidate)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _natively(self, tensor: Tensor) -> Tensor:
        """A copy; what was rounded to int8 levels in float64 comes back to the candidate's dtype."""
        return natively(tensor.to(self.recorded.dtype) if tensor.dtype == torch.float64 else tensor)

    def _to_native(self, tensor: Tensor) -> Tensor:
        recorded = self.recorded
        wide = tensor.is_floating_point() and torch.finfo(tensor.dtype).eps < torch.finfo(recorded.dtype).eps
        # A matrix that is wider than the recording was taken from a candidate's 8-bit one (`adopt`).
        dequantized = isinstance(tensor, nn.Parameter) and tensor.dim() > 1
        narrows = wide and (dequantized or tensor.dtype == recorded.recorded_dtype)
        return tensor.to(recorded.dtype) if narrows else tensor

    def _note_dtypes(self, pair: Pair, rounded: Sequence[Seen]) -> None:
        if len(pair.sources) != 1:
            return
        for record, seen in zip(self.recorded.records[pair.sources[0]], rounded, strict=False):
            self.recorded.note_dtypes(record, [tensor for _, tensor in tensors(seen.output, "")])

    def fills_cache(self, pair: Pair) -> bool:
        """Whether the module itself appends to the cache that it was given, and does not only hand it to a child."""
        held, source = self.recorded.holds_cache, pair.sources[0]
        if not held(source) or not any(held(child.sources[0]) for child in self.pairing.children(pair)):
            return held(source)
        return self.source is not None and appends_to_cache(self.source.get_submodule(source))

    def _quantized(self, module: nn.Module, calls: Sequence[Call]) -> Sequence[Call]:
        return rounded_activations(module, calls) if quantizes_activations(module) == "linear" else calls


def replay_all(replayer: Replayer, pairs: Iterable[Pair], advance: Callable[[int], None]) -> Iterator[ModuleResult]:
    """The results in execution order, one at a time: nothing of a module is kept once the next is asked for."""
    for pair in pairs:
        yield replayer.replay(pair)
        advance(1)


def _left_alone(side: Side, calls: Sequence[Call]) -> list[nn.Module]:
    forced = {name for call in calls for name in (call.source_forced if side.source else call.forced)}
    return skipped_children(side.module, forced)
