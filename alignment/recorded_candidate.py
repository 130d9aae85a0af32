"""A candidate that is itself a recording: nothing of it can be run, so the source is replayed on what it recorded.

Each recorded module is compared with the float64 oracle of the source on the candidate's own inputs, its children's
outputs as the candidate recorded them. That separates introduced from inherited errors as replay does, with one lane:
the precision that the candidate was recorded in.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from porter.alignment.calls import Call, child_calls, length, shapes_handed
from porter.alignment.forced_children import holds_tensors
from porter.alignment.forcing import ForcedCall, Handed, handed, input_label
from porter.alignment.lanes import Side, seen_of
from porter.alignment.model_call import CannotRun
from porter.alignment.module_result import ModuleResult
from porter.alignment.pairing import Pair, relative_name
from porter.alignment.precision_swap import swapped
from porter.alignment.replay import Replayer
from porter.alignment.rounded_source import RoundedSource
from porter.alignment.streaming import reach
from porter.errors import PorterError
from porter.golden.format import Record

RECORDED = "recorded: judged in the precision of the recording alone"


@dataclass
class RecordedReplayer(Replayer):
    """Replays the source on the records of a candidate; `recorded` is the candidate's golden.

    `rounded_source` is what rounding to the recording's dtype took from the source's parameters.
    """

    rounded_source: RoundedSource = field(default_factory=lambda: RoundedSource({}))

    def replay(self, pair: Pair) -> ModuleResult:
        """As `Replayer.replay`, in the one lane that a recording has."""
        assert self.source is not None, "a recording is compared with a source model"
        reach(self.source, pair.sources[0])
        theirs = self.source_side(pair)
        assert theirs is not None, "there is a source"
        try:
            observed = [self._observed(pair, record, theirs) for record in self.recorded.records[pair.module]]
        except PorterError as error:
            return ModuleResult(pair, (), why=str(error))
        result = ModuleResult(pair, self._with_past([call for call, _ in observed]))
        result.candidate_native = [seen_of(theirs.module, call.output, found, call) for call, found in observed]
        try:
            self._judge(result, theirs)
            if result.over_native:
                self._read_otherwise(result, theirs)
        except CannotRun as error:
            result.why = f"the source cannot be replayed on the candidate's inputs: {error}"
        return result

    def _judge(self, result: ModuleResult, theirs: Side) -> None:
        result.oracle = self.run_exact(theirs, result.calls)
        if any(seen.otherwise for seen in result.oracle):
            self._run_unlike_children(result)
            result.oracle = self.run_exact(theirs, result.calls)
        self.judge_native(result, theirs, result.calls, self.run_rounded(theirs, result.calls), 0.0)
        result.why = RECORDED

    def _read_otherwise(self, result: ModuleResult, theirs: Side) -> None:
        """A recording does not tell in which dtype each weight and table was kept: every usual one is legitimate."""
        for words, reading in self._readings().items():
            with reading(theirs.module):
                self._judge(result, theirs)
            if not result.over_native:
                result.why = f"{RECORDED}; {words}"
                return
        self._judge(result, theirs)

    def _readings(self) -> dict[str, Callable[[nn.Module], AbstractContextManager[None]]]:
        return {
            "as if its weights had been kept as wide as the golden's": self.rounded_source.unrounded,
            f"as if its tables had been rounded to {self.recorded.dtype}".replace("torch.", ""): self._tables_rounded,
        }

    def _tables_rounded(self, module: nn.Module) -> AbstractContextManager[None]:
        return swapped(module, self._narrowed)

    def _narrowed(self, tensor: Tensor) -> Tensor:
        wide = tensor.is_floating_point() and torch.finfo(tensor.dtype).eps < torch.finfo(self.recorded.dtype).eps
        return tensor.to(self.recorded.dtype) if wide else tensor

    def _run_unlike_children(self, result: ModuleResult) -> None:
        """Let the source run the children that it calls unlike the candidate did."""
        otherwise = {name for seen in result.oracle for name in seen.otherwise}
        result.calls = [
            replace(call, source_forced={n: c for n, c in call.source_forced.items() if n not in otherwise})
            for call in result.calls
        ]

    def _observed(self, pair: Pair, record: Record, theirs: Side) -> tuple[Call, Handed]:
        inputs = self.recorded.value(record.inputs)
        source_forced: dict[str, list[ForcedCall]] = {}
        found = Handed({}, {}, set())
        for child in self.pairing.children(pair):
            module = self.source.get_submodule(child.sources[0]) if self.source is not None else None
            if module is None or not holds_tensors(module):
                continue
            records = child_calls(self.recorded, record, child.module)
            name = relative_name(child.module, pair.module)
            for number, each in enumerate(records):
                given = self.recorded.value(each.inputs)
                for index, tensor in enumerate(handed(tuple(given["args"]), given["kwargs"])):
                    found.tensors[input_label(name, number, index)] = tensor
            outputs = [self.recorded.value(each.outputs) for each in records]
            for index, source in enumerate(child.sources):
                own = relative_name(source, pair.sources[0])
                source_forced[own] = [
                    ForcedCall(shapes_handed(each), self._part(child, output, index))
                    for each, output in zip(records, outputs, strict=True)
                ]
        call = Call(
            record.step,
            record.batch,
            tuple(inputs["args"]),
            inputs["kwargs"],
            self.recorded.value(record.outputs),
            keep=self.recorded.keep(record),
            source_forced=source_forced if len(pair.sources) == 1 else {},
        )
        return _without_residual(call, theirs.module), found

    def _part(self, child: Pair, output: Any, index: int) -> Any:
        if len(child.sources) == 1:
            return output
        return self.pairing.correspondence.split_output(child.module, output)[index]

    def _with_past(self, calls: Sequence[Call]) -> list[Call]:
        past: dict[int, int] = {}
        counted = []
        for call in calls:
            counted.append(replace(call, past=past.get(call.batch, 0)))
            past[call.batch] = past.get(call.batch, 0) + length(call.args, call.kwargs)
        return counted

    def fills_cache(self, pair: Pair) -> bool:
        """Whether the module itself, not a child, was given the cache."""
        records = self.recorded.records
        below = self.pairing.children(pair)
        return self.recorded.holds_cache(pair.module) and not any(
            self.recorded.holds_cache(child.module) for child in below if child.module in records
        )


def _without_residual(call: Call, source: nn.Module) -> Call:
    """A norm that was given the residual to add returns (normed, sum): the sum is what the source's norm is given."""
    output, accepts = call.output, 0
    for parameter in inspect.signature(source.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            return call
        accepts += parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    if len(call.args) <= accepts or not isinstance(output, tuple) or len(output) != 2:
        return call
    return replace(call, args=(output[1],), output=output[0])
