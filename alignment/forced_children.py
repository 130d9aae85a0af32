"""Which children are forced when their parent is replayed: the same on both sides, or neither side proves anything."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from porter.alignment.module_result import ModuleResult
from porter.alignment.pairing import Pairing, relative_name


def force_holding_weights(module: nn.Module, pairing: Pairing, result: ModuleResult) -> None:
    """Force only children that hold weights or tables; `module` is the candidate's.

    An activation is cheap to run, and an implementation may give it its rows in another order.
    """
    names = {name for call in result.calls for name in call.forced}
    _force_only(pairing, result, {name for name in names if holds_tensors(module.get_submodule(name))})


def force_alike(pairing: Pairing, result: ModuleResult) -> bool:
    """Force only those children that the candidate calls, and calls as recorded: what it computes by other means, the
    source must compute too. True where the candidate must run again."""
    otherwise = {name for seen in result.candidate_native for name in seen.otherwise}
    _force_only(pairing, result, {name for seen in result.candidate_native for name in seen.called} - otherwise)
    return bool(otherwise)


def unforced_children(pairing: Pairing, result: ModuleResult) -> set[str]:
    """The candidate's names of paired children that ran in the replay of their parent."""
    forced = {name for call in result.calls for name in call.forced}
    children = pairing.children(result.pair)
    return {child.module for child in children if relative_name(child.module, result.pair.module) not in forced}


def _force_only(pairing: Pairing, result: ModuleResult, names: Collection[str]) -> None:
    pair = result.pair
    own = {
        relative_name(source, pair.sources[0])
        for child in pairing.children(pair)
        if relative_name(child.module, pair.module) in names
        for source in child.sources
    }
    result.calls = [
        replace(
            call,
            forced={name: each for name, each in call.forced.items() if name in names},
            source_forced={name: each for name, each in call.source_forced.items() if name in own},
        )
        for call in result.calls
    ]


def holds_tensors(module: nn.Module) -> bool:
    """Whether a module has parameters or buffers, itself or below."""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())
