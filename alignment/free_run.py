"""The free pass: the candidate runs whole on the golden's tokens, and every module's output is compared as it appears.

Decode steps are fed the golden's tokens (teacher forcing), so both sides stay on the same text. How much rounding
grows along the model is measured, not assumed: the source runs the same way in the candidate's precision, and exactly.
Those runs give each module's gain, from the error of its inputs to that of its output, and with it and the error that
the replay found a module to introduce, what its output's error should be. What is far beyond is a suspect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from porter.alignment.budget import least
from porter.alignment.calls import Recorded, cache_after, mapped, new_cache
from porter.alignment.free_watch import FreeErrors, Key, Watch
from porter.alignment.lanes import natively
from porter.alignment.model_call import called
from porter.alignment.pairing import Pair, Pairing
from porter.alignment.precision_swap import exact
from porter.alignment.replay import Replayer

__all__ = ["BASELINES", "FreeErrors", "Key", "limit", "predicted", "run_whole"]


def run_whole(
    model: nn.Module,
    recorded: Recorded,
    pairs: dict[str, Pair],
    pairing: Pairing,
    names: Callable[[Pair], tuple[str, ...]],
    precision: AbstractContextManager[Any] | None = None,
) -> FreeErrors:
    """Run `model` on the recorded root inputs, step by step with its own caches, comparing as it goes.

    `names` gives the model's own names of a pair's modules: the candidate's one, or the sources. Raises CannotRun
    where the model raises.
    """
    found = FreeErrors()
    watch = Watch(recorded, pairing, found)
    caches: dict[int, Any] = {}
    config = getattr(model, "config", None)
    with torch.no_grad(), precision or nullcontext(), watch.hooked(model, pairs, names):
        for record in recorded.records.get("", []):
            first = record.batch not in caches
            if first:
                caches = {record.batch: new_cache(config)}
            inputs = mapped(recorded.value(record.inputs), natively, caches[record.batch])
            watch.begin(record, first)
            output = called(model, *inputs["args"], **inputs["kwargs"])
            watch.logits(output, record)
            caches[record.batch] = cache_after(output, caches[record.batch])
    return found


def limit(baselines: Sequence[FreeErrors], key: Key, dtype: torch.dtype, slack: float) -> float:
    """The end-to-end error that rounding explains: `slack` times the largest that the source itself makes."""
    grown = max((baseline.end_to_end.get(key, 0.0) for baseline in baselines), default=0.0)
    return slack * max(grown, least(dtype))


def predicted(
    baselines: Sequence[FreeErrors], key: Key, dtype: torch.dtype, inherited: float | None, introduced: float
) -> float:
    """The error that a module's output should have against the golden.

    `inherited` is the error of what the module was given (None where that is not floating-point), `introduced` its own
    as the replay found it. The gain is the largest of the source's runs, where these have an error to show it, else
    one, as of a norm or a sum. No less than the source's own runs have grown.
    """
    gains = [
        baseline.end_to_end[key] / baseline.inputs[key]
        for baseline in baselines
        if baseline.inputs.get(key, 0.0) > 0 and key in baseline.end_to_end
    ]
    passed_on = 0.0 if inherited is None else max(gains, default=1.0) * inherited
    return max(limit(baselines, key, dtype, 1.0), passed_on + introduced)


def rounded_baseline(replayer: Replayer, pairs: dict[str, Pair]) -> FreeErrors:
    """The source whole in the candidate's precision, activations rounded where the candidate's scheme rounds them."""
    source = replayer.source
    assert source is not None, "asked for only where there is a source"
    with replayer.rounding_activations(source):
        return _source_run(replayer, pairs, source, replayer.rounded(source))


def exact_baseline(replayer: Replayer, pairs: dict[str, Pair]) -> FreeErrors:
    """The source whole in float64: how far rounding took the golden itself.

    Where golden and candidate share dtype and implementation, the rounded source repeats the golden bit for bit, and
    only this run shows how rounding grows.
    """
    source = replayer.source
    assert source is not None, "asked for only where there is a source"
    return _source_run(replayer, pairs, source, exact(source))


BASELINES = {"in the candidate's precision": rounded_baseline, "in float64": exact_baseline}
"""The source's own runs, by how they are run."""


def _source_run(
    replayer: Replayer, pairs: dict[str, Pair], source: nn.Module, precision: AbstractContextManager[Any]
) -> FreeErrors:
    return run_whole(source, replayer.recorded, pairs, replayer.pairing, lambda pair: pair.sources, precision)
