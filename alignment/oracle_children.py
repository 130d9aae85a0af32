"""The children of a module that is explained: their outputs in float64 instead of as recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from porter.alignment.calls import Call
from porter.alignment.forcing import ForcedCall
from porter.alignment.model_call import CannotRun
from porter.alignment.module_result import ModuleResult
from porter.alignment.pairing import Pair, relative_name
from porter.alignment.replay import Replayer

GIVEN_AS_RECORDED = "cannot be replayed in float64, so the module around it was explained with its recorded output"


def oracle_forced(replayer: Replayer, result: ModuleResult) -> list[Call]:
    """The calls with the children's outputs in float64 instead of as recorded.

    The recorded ones are rounded, so a hypothesis that lets a child run would differ from them by that rounding alone.
    """
    calls = list(result.calls)
    for child in replayer.pairing.children(result.pair):
        if replayer.recorded.holds_cache(child.sources[0]) or replayer.pairing.children(child):
            continue
        side = replayer.source_side(child)
        assert side is not None, "the parent has a source"
        try:
            outputs = [
                seen.output for seen in replayer.run_exact(side, replayer.recorded.calls(child, replayer.pairing))
            ]
        except CannotRun as error:
            replayer.refuse(child.module, f"{GIVEN_AS_RECORDED}: {error}")
            continue
        calls = _with_outputs(replayer, result.pair, child, calls, outputs)
    return calls


def _with_outputs(replayer: Replayer, pair: Pair, child: Pair, calls: list[Call], outputs: list[Any]) -> list[Call]:
    name = relative_name(child.module, pair.module)
    if sum(len(call.forced.get(name, ())) for call in calls) != len(outputs):
        return calls
    left = iter(outputs)
    changed = []
    for call in calls:
        mine = [next(left) for _ in call.forced.get(name, ())]
        forced = dict(call.forced) | {name: _outputs(call.forced.get(name, ()), mine)}
        source_forced = dict(call.source_forced)
        for index, source in enumerate(child.sources):
            own = relative_name(source, pair.sources[0])
            if own in source_forced:
                parts = [_part(replayer, child, output, index) for output in mine]
                source_forced[own] = _outputs(source_forced[own], parts)
        changed.append(replace(call, forced=forced, source_forced=source_forced))
    return changed


def _part(replayer: Replayer, child: Pair, output: Any, index: int) -> Any:
    if len(child.sources) == 1:
        return output
    return replayer.pairing.correspondence.split_output(child.module, output)[index]


def _outputs(calls: Sequence[ForcedCall], outputs: Sequence[Any]) -> list[ForcedCall]:
    return [replace(call, output=output) for call, output in zip(calls, outputs, strict=True)]
