"""From a drifting module to what a hypothesis needs to explain it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from porter.alignment.budget import least
from porter.alignment.calls import Call, source_module
from porter.alignment.drift import Drift
from porter.alignment.forcing import Untouched
from porter.alignment.lanes import Change, Seen, Side, exactly, natively, run_calls, skipped_children
from porter.alignment.module_result import ModuleResult
from porter.alignment.observation import Observation, worst
from porter.alignment.oracle_children import oracle_forced
from porter.alignment.pairing import Pair, Pairing, relative_name
from porter.alignment.precision_swap import exact
from porter.alignment.replay import Replayer
from porter.alignment.report import Cause
from porter.alignment.states import LABEL
from porter.alignment.streaming import Tensors, reach
from porter.alignment.verdict import owner_of
from porter.alignment.weight import JudgedWeight

BIAS = "e_score_correction_bias"
"""A buffer of routers that checkpoints hold, as they hold parameters."""
PLAIN = (bool, int, float, str, type(None))


def drift_of(replayer: Replayer, result: ModuleResult, weights: Sequence[JudgedWeight]) -> Drift | None:
    """The Drift of a module that `result` found over its budget; None where there is no float64 source to compare."""
    theirs = replayer.source_side(result.pair)
    if theirs is None or not result.oracle:
        return None
    lane = "exact" if any(v is not None and v.over for v in result.exact) else "native"
    mine = replayer.side(result.pair)
    calls = oracle_forced(replayer, result) if lane == "exact" else list(result.calls)
    forced = {name for call in calls for name in call.source_forced}
    source = _float64_copy(theirs.module, skipped_children(theirs.module, forced))
    side = replace(theirs, module=source)
    candidate = _rerun(replayer, mine, calls, result.candidate_exact) if lane == "exact" else result.candidate_native
    oracle = _observations(run_calls(side, calls, exactly, exact(source, skipped_children(source, forced))))
    verdicts = [v for v in (result.exact if lane == "exact" else result.native) if v is not None]
    values, expected, quantized = _weights(result.pair, weights)
    label, before, index = worst(_observations(candidate), oracle)
    return Drift(
        module=result.pair.module,
        source=result.pair.source,
        kind=type(mine.module).__name__,
        lane=lane,
        tensor=label,
        step=result.calls[index].step,
        before=before,
        floor=max((v.budget for v in verdicts), default=0.0),
        source_module=source,
        candidate_module=mine.module,
        source_output=oracle,
        candidate_output=_observations(candidate),
        config=side.config,
        weights=values,
        expected=expected,
        quantized=quantized,
        dtype=replayer.recorded.dtype,
        keep=[call.keep for call in calls],
        forced=frozenset(forced),
        states=narrow_states(result) if lane == "native" else (),
        elsewhere=_elsewhere(replayer.source, result.pair),
        run_candidate=_again(replayer, mine, calls, lane),
        run_module=_runner(side, calls, forced),
    )


def narrow_states(result: ModuleResult) -> list[str]:
    """The states that are over their budget in fewer bits than the source's, where no other tensor is over its own."""
    over = [verdict for call in result.tensors for verdict in call if verdict.over]
    if not over or not all(verdict.label.startswith(LABEL) for verdict in over):
        return []
    names = dict.fromkeys(verdict.label.removeprefix(LABEL) for verdict in over)
    floors = {LABEL + name: max(v.floor for v in over if v.label == LABEL + name) for name in names}
    held = {name: seen.states[name].held for seen in result.candidate_native for name in names if name in seen.states}
    return [f"{n} in {str(d).removeprefix('torch.')}" for n, d in held.items() if least(d) > floors[LABEL + n]]


def causes_of_weights(
    weights: Sequence[JudgedWeight], pairing: Pairing, source: nn.Module, explained: Collection[str], most: int
) -> list[Cause]:
    """The causes of wrong parameters from their values alone, no module is run; of the first `most` modules in
    execution order that hold such parameters and are not among those `explained` already."""
    from porter.alignment.hypotheses.catalogue import explain_parameters

    wrong: dict[Pair, list[JudgedWeight]] = {}
    for judged in weights:
        if judged.row.status == "drift":
            owner, name = judged.weight.owner, owner_of(judged, pairing)
            alone = Pair(owner, (judged.weight.source.rpartition(".")[0],), 0)
            # A module further up holds layers, which are not in memory at once.
            near = name in (owner, owner.rpartition(".")[0])
            wrong.setdefault(pairing.by_module.get(name, alone) if near else alone, []).append(judged)
    ordered = sorted((pair for pair in wrong if pair.module not in explained), key=lambda pair: pair.position)
    found = []
    for pair in ordered[:most]:
        reach(source, pair.sources[0])
        found += explain_parameters(_drift_of_weights(pair, wrong[pair], source))
    return found


def _drift_of_weights(pair: Pair, weights: Sequence[JudgedWeight], source: nn.Module) -> Drift:
    values, expected, quantized = _weights(pair, weights)
    worst_row = max((judged.row.error or 0.0 for judged in weights), default=0.0)
    floating = [judged.weight.dtype for judged in weights if judged.weight.dtype.is_floating_point]
    return Drift(
        module=pair.module,
        source=pair.source,
        kind="",
        lane="exact",
        tensor=weights[0].weight.name.rpartition(".")[2],
        step=0,
        before=worst_row,
        floor=max(expected.values(), default=0.0),
        source_module=source_module(source, pair),
        candidate_module=None,
        source_output=[],
        candidate_output=[],
        config=getattr(source, "config", None),
        dtype=max(floating, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32),
        weights=values,
        elsewhere=_elsewhere(source, pair),
        expected=expected,
        quantized=quantized,
    )


def _rerun(replayer: Replayer, mine: Side, calls: Sequence[Call], before: Sequence[Seen]) -> Sequence[Seen]:
    return replayer.run_exact(mine, calls) if any(call.forced for call in calls) else before


def _again(replayer: Replayer, mine: Side, calls: Sequence[Call], lane: str) -> Callable[[], list[Observation]]:
    def run() -> list[Observation]:
        return _observations(replayer.run_exact(mine, calls) if lane == "exact" else run_calls(mine, calls, natively))

    return run


def _observations(seen: Sequence[Seen]) -> list[Observation]:
    return [{label: exactly(tensor) for label, tensor in each.tensors.items()} for each in seen]


def _float64_copy(module: nn.Module, shared: Sequence[nn.Module]) -> nn.Module:
    """A float64 copy that owns its tensors, but for the children in `shared`, which are forced and only looked at."""
    with exact(module, shared):
        return copy.deepcopy(module, {id(child): child for child in shared})


def _runner(
    side: Side, calls: Sequence[Call], forced: set[str]
) -> Callable[[nn.Module, Change | None], list[Observation]]:
    originals = {name: side.module.get_submodule(name) for name in forced}

    def run(module: nn.Module, inputs: Change | None) -> list[Observation]:
        changed = replace(side, module=module)
        precision = exact(module, skipped_children(module, forced))
        return _observations(run_calls(changed, calls, exactly, precision, untouched_since(originals), inputs))

    return run


def untouched_since(originals: Mapping[str, nn.Module]) -> Untouched:
    """Whether a child still has the parameters, plain attributes and forward that it had. Hooks do not count."""

    def untouched(name: str, child: nn.Module) -> bool:
        return name in originals and _same(child, originals[name])

    return untouched


def _same(module: nn.Module, original: nn.Module) -> bool:
    if module is original:
        return True
    if ("forward" in module.__dict__) != ("forward" in original.__dict__) or type(module) is not type(original):
        return False
    for mine, theirs in ((module._parameters, original._parameters), (module._buffers, original._buffers)):
        if mine.keys() != theirs.keys() or not all(_equal(mine[name], theirs[name]) for name in mine):
            return False
    plain = {name for name, value in original.__dict__.items() if isinstance(value, PLAIN)}
    if any(module.__dict__.get(name) != original.__dict__[name] for name in plain):
        return False
    children = dict(original.named_children())
    return all(name in children and _same(child, children[name]) for name, child in module.named_children())


def _equal(mine: Tensor | None, theirs: Tensor | None) -> bool:
    if mine is None or theirs is None or mine is theirs:
        return mine is theirs
    if mine.is_meta or theirs.is_meta:  # still on disk, so nobody has changed it
        return mine.is_meta and theirs.is_meta
    return mine.shape == theirs.shape and mine.dtype == theirs.dtype and torch.equal(mine, theirs)


def _elsewhere(source: nn.Module | None, pair: Pair) -> Mapping[str, Tensor]:
    """The parameters of the source model outside the pair; the tensors themselves, not copies, or read on demand."""
    if source is None:
        return {}
    own = tuple(f"{name}." for name in pair.sources)
    return Tensors(source, [name for name, _ in source.named_parameters() if not name.startswith(own)])


def _weights(
    pair: Pair, weights: Sequence[JudgedWeight]
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, float], frozenset[str]]:
    """(the source's, the candidate's) values of the pair's own parameters, under the source module's own names; the
    error that each may have; and which are quantized."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    expected: dict[str, float] = {}
    quantized = set()
    for judged in weights:
        weight = judged.weight
        if not (weight.is_parameter or weight.source.endswith(BIAS)):
            continue
        for source in (each for each in pair.sources if weight.source.startswith(f"{each}.")):
            reference, candidate = weight.reference, weight.candidate
            if reference is None or candidate is None:
                continue
            inner = relative_name(weight.source, source)
            name = inner if len(pair.sources) == 1 else f"{source.rpartition('.')[2]}.{inner}"
            found[name] = (exactly(reference), exactly(candidate))
            expected[name] = judged.row.expected or 0.0
            if weight.step is not None:
                quantized.add(name)
    return found, expected, frozenset(quantized)
