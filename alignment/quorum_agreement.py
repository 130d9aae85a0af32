"""Whether two goldens agree on a module: by the float64 oracle on the inputs of each, or by each other's tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from porter.alignment.budget import least
from porter.alignment.calls import Recorded
from porter.alignment.module_result import ModuleResult
from porter.alignment.observation import first_tensor, relative, tensors
from porter.alignment.pairing import pair_modules
from porter.alignment.recorded_candidate import RecordedReplayer
from porter.alignment.rounded_source import round_to
from porter.alignment.source import rebuild_source
from porter.correspondence import Correspondence
from porter.errors import PorterError
from porter.golden.format import Record, dtype_of
from porter.golden.node import tensor_nodes
from porter.golden.store import Golden

GAIN = 8.0
"""How much larger than the difference of its inputs the difference of a module's outputs may be without an oracle."""

SAME = 0.1
"""Two goldens that are both off the oracle are off alike where they differ by this part of the error."""

FLOORS = 8.0
"""Roundings of one output without an oracle, in least floors of the dtype."""

Agree = Callable[[str, int, int], bool]


def oracle_of(goldens: Sequence[Golden]) -> nn.Module | None:
    """The source of the golden with the finest dtype that can be rebuilt: a coarser one has rounded the weights."""
    for golden in sorted(goldens, key=lambda each: torch.finfo(dtype_of(each.manifest["dtype"] or "float32")).eps):
        try:
            return rebuild_source(golden)
        except PorterError:
            continue
    return None


@dataclass(frozen=True)
class _Deviation:
    """How a golden's module is off the oracle on the golden's own inputs; tensors only where it is over its budget."""

    over: bool
    errors: dict[tuple[int, str], Tensor]
    judged: bool

    def like(self, other: _Deviation) -> bool:
        """Whether both are off by the same, in what both are off by."""
        shared = [(self.errors[key], other.errors[key]) for key in self.errors.keys() & other.errors.keys()]
        return bool(shared) and all(
            mine.shape == theirs.shape
            and float((mine - theirs).norm()) <= SAME * float(max(mine.norm(), theirs.norm()))
            for mine, theirs in shared
        )


def _deviations(golden: Golden, oracle: nn.Module, factor: float, steps: set[int]) -> dict[str, _Deviation]:
    """Of every module of a golden, replayed as a candidate that is a recording is."""
    dtype = dtype_of(golden.manifest["dtype"] or "float32")
    source = copy.deepcopy(oracle)
    rounded = round_to(source, dtype)
    known = {name for name, _ in source.named_modules()}
    names = [name for name in dict.fromkeys(record.module for record in golden.records) if name in known]
    pairing = pair_modules(golden, names, Correspondence())
    replayer = RecordedReplayer(Recorded(golden, dtype, torch.device("cpu")), pairing, source, source, factor, rounded)
    replayer.recorded.recorded_dtype = dtype
    found = {}
    for pair in pairing.pairs:
        result = replayer.replay(pair)
        found[pair.module] = _Deviation(result.drifted, _errors(result, steps), result.compared)
    return found


def _errors(result: ModuleResult, steps: set[int]) -> dict[tuple[int, str], Tensor]:
    """Of the tensors that are over their budget, by call and label, at the steps that all goldens share."""
    found = {}
    for number, (call, verdicts) in enumerate(zip(result.calls, result.tensors, strict=False)):
        mine, exact = result.candidate_native[number].tensors, result.oracle[number].tensors
        for label in (verdict.label for verdict in verdicts if verdict.over and call.step in steps):
            if label in mine and mine[label].shape == exact[label].shape:
                found[number, label] = mine[label].to(torch.float64) - exact[label].to(torch.float64)
    return found


def by_oracle(goldens: Sequence[Golden], oracle: nn.Module, steps: set[int], factor: float) -> Agree:
    """Agreement on a module: both within rounding of the oracle on their own inputs, or off it by the same."""
    deviations = [_deviations(golden, oracle, factor, steps) for golden in goldens]

    def agree(module: str, a: int, b: int) -> bool:
        one, other = deviations[a].get(module), deviations[b].get(module)
        if one is None or other is None or not (one.judged and other.judged) or not (one.over or other.over):
            return True
        return one.over and other.over and one.like(other)

    return agree


def in_pairs(goldens: Sequence[Golden], steps: set[int], factor: float) -> Agree:
    """Agreement on a module without an oracle: outputs differ no more than the inputs and the dtype let them."""
    records = [
        {(record.module, record.step, record.call): record for record in golden.records if record.step in steps}
        for golden in goldens
    ]

    around = {module.rpartition(".")[0] for held in records for module, *_ in held if module}

    def agree(module: str, a: int, b: int) -> bool:
        keys = [key for key in records[a] if key[0] == module and key in records[b]]
        if module in around and not any(_floating_inputs(records[a][key]) for key in keys):
            return True  # the whole model or its body: what it was given says nothing of what its layers brought
        return all(_same(goldens[a], records[a][key], goldens[b], records[b][key], factor) for key in keys)

    return agree


def _same(one: Golden, mine: Record, other: Golden, theirs: Record, factor: float) -> bool:
    """Whether two recorded calls give what their inputs and the dtype let them."""
    try:
        outputs = first_tensor(one.value(mine.outputs)), first_tensor(other.value(theirs.outputs))
        given, also_given = (dict(tensors(g.value(r.inputs), "")) for g, r in ((one, mine), (other, theirs)))
    except PorterError:
        return True  # an argument that was not recorded: nothing can be said of this call
    a, b = outputs
    if a is None or b is None or not (a.is_floating_point() and b.is_floating_point()):
        return True
    apart = 0.0
    for label in given.keys() & also_given.keys():
        x, y = given[label], also_given[label]
        if x.shape != y.shape or (not x.is_floating_point() and not torch.equal(x, y)):
            return True
        if x.is_floating_point() and x.dim() < 4:
            apart = max(apart, relative(x, y))
    floor = FLOORS * max(least(a.dtype), least(b.dtype))
    return relative(a, b) <= factor * floor + GAIN * apart


def _floating_inputs(record: Record) -> bool:
    return any(dtype_of(node["dtype"]).is_floating_point for node in tensor_nodes(record.inputs))
