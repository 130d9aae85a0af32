"""From what was found to what is said: rows, first drift, coverage, verdict."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from porter.alignment.pairing import Pairing
from porter.alignment.report import Coverage, FirstDrift, ModuleRow, Skipped, WeightRow
from porter.alignment.weight import JudgedWeight
from porter.alignment.weights import beside_codes

COVERAGE_NEEDED = 0.95
"""The share of the parameters that must have been compared for any verdict but `incomparable` or `drift`."""


@dataclass(frozen=True)
class Drifted:
    """Something over its budget, at its place in execution order."""

    position: tuple[int, int]
    drift: FirstDrift


def owner_of(weight: JudgedWeight, pairing: Pairing) -> str:
    """The paired module that holds a weight, or its owner's own name."""
    name = weight.weight.owner
    while name not in pairing.by_module and name:
        name = name.rpartition(".")[0]
    return name if name in pairing.by_module else weight.weight.owner


def drifted_weights(weights: Sequence[JudgedWeight], pairing: Pairing) -> list[Drifted]:
    """Weights over their budget, as drifts of the modules that hold them, at the first step."""
    found = []
    for judged in weights:
        if judged.row.status != "drift":
            continue
        module = owner_of(judged, pairing)
        pair = pairing.by_module.get(module)
        # Below a module that holds no paired one of its own, the parameter is named by its way from there.
        within = judged.weight.name.removeprefix(f"{module}.") if module else judged.weight.name
        source = judged.weight.source.rpartition(".")[0] if pair is None else pair.source
        found.append(Drifted((0, pair.position if pair else 0), FirstDrift(module, source, 0, within)))
    return found


def coverage(
    candidate: nn.Module | None,
    pairing: Pairing,
    compared: Collection[str],
    weights: Sequence[JudgedWeight] | None,
    skipped: Sequence[Skipped],
    met: float = 1.0,
) -> Coverage:
    """What was compared: of the called modules, of the parameter elements, and of the flops of the matrix products.

    A parameter counts when its module was compared (where modules were) and its value was (where values were). `met`:
    the share of the golden's model that the candidate has at all, which bounds what was compared.
    """
    callable_modules = [*compared, *(s.module for s in skipped), *pairing.unmatched_golden]
    modules = len(set(compared)) / max(1, len(set(callable_modules)))
    if candidate is None:
        return Coverage(modules, modules, None, tuple(skipped))
    judged = {} if weights is None else _elements_by_name(weights)
    total = counted = flops = flops_counted = 0.0
    for name, parameter in candidate.named_parameters():
        elements = parameter.numel()
        share = judged.get(name, 0.0) if weights is not None else 1.0
        replayed = _inside(name.rpartition(".")[0], compared)
        total += elements
        counted += elements * share * replayed
        if parameter.dim() > 1:
            flops += elements
            flops_counted += elements * replayed
    parameters = min(met, counted / total if total else 1.0)
    return Coverage(modules, parameters, min(met, flops_counted / flops) if flops else None, tuple(skipped))


def _elements_by_name(weights: Sequence[JudgedWeight]) -> Mapping[str, float]:
    """The share of each candidate parameter's parts that were compared."""
    parts: dict[str, list[bool]] = {}
    for judged in weights:
        parts.setdefault(judged.weight.name, []).append(judged.row.status != "skipped")
        if judged.weight.quantized:
            parts |= dict.fromkeys(beside_codes(judged.weight.name), parts[judged.weight.name])
    return {name: sum(known) / len(known) for name, known in parts.items()}


def _inside(owner: str, compared: Collection[str]) -> bool:
    """Whether the module that holds a parameter was compared, itself or as a part of the module above it."""
    if owner in compared:
        return True
    return bool(owner) and owner.rpartition(".")[0] in compared


def verdict_of(drifts: Sequence[Drifted], covered: Coverage, unjudged: bool = False) -> str:
    """`drift` where anything is over its budget; `incomparable` below the coverage needed, or where a pass that was
    asked for had nothing to judge by (`unjudged`); else `aligned`."""
    if drifts:
        return "drift"
    return "incomparable" if unjudged or covered.parameters < COVERAGE_NEEDED else "aligned"


def first_of(drifts: Sequence[Drifted]) -> FirstDrift | None:
    """The first module in execution order, at its first step: every module was judged on the golden's inputs, so one
    that shows its fault only in decode does not inherit it from a later module that errs in the prefill already."""
    return min(drifts, key=lambda drifted: drifted.position[::-1]).drift if drifts else None


def statuses(rows: Sequence[ModuleRow]) -> set[str]:
    """The statuses that occur."""
    return {row.status for row in rows}


def skipped_weights(rows: Sequence[WeightRow]) -> list[Skipped]:
    """Parameters that could not be compared, as the report lists them."""
    return [Skipped(row.parameter, row.why) for row in rows if row.status == "skipped"]
