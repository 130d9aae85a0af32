"""Gate and up exchanged: silu(up) * gate, or the two interleaved where the source has halves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import experts, parts
from porter.alignment.hypotheses.surgery import set_parameter
from porter.alignment.hypotheses.trial import Trial, TrialHypothesis

SWAPPED = (
    "The gate and up projections are exchanged, silu(up) * gate: load gate_proj into the first half of gate_up_proj"
)
INTERLEAVED = "The rows of gate and up alternate where the source has two halves: de-interleave gate_up_proj on loading"


ALTERNATE = "Gate and up are read as alternating rows where the source has two halves: split gate_up_proj in the middle"


def swap_halves(weight: torch.Tensor) -> torch.Tensor:
    """The two halves of the rows (the dimension before the last) exchanged."""
    return weight.roll(weight.shape[-2] // 2, dims=-2)


def interleave_halves(weight: torch.Tensor) -> torch.Tensor:
    """Rows (0, I, 1, I + 1, ...) of a weight [..., 2I, H]: an interleaved layout read as halves."""
    rows = weight.shape[-2]
    return weight[..., torch.arange(rows, device=weight.device).view(2, rows // 2).t().reshape(-1), :]


def alternate_halves(weight: torch.Tensor) -> torch.Tensor:
    """Rows (0, 2, 4, ..., 1, 3, 5, ...) of a weight [..., 2I, H]: halves read as an interleaved layout."""
    rows = weight.shape[-2]
    return weight[..., torch.arange(rows, device=weight.device).view(rows // 2, 2).t().reshape(-1), :]


def _swap_children(path: str) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        owner = module.get_submodule(path)
        for leaf in ("weight", "bias"):
            gate, up = (owner.get_submodule(name)._parameters.get(leaf) for name in ("gate_proj", "up_proj"))
            if gate is not None:
                set_parameter(owner, f"gate_proj.{leaf}", up)
                set_parameter(owner, f"up_proj.{leaf}", gate)

    return change


def _regroup_children(path: str, regroup: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        owner = module.get_submodule(path)
        gate, up = (owner.get_parameter(f"{name}.weight") for name in ("gate_proj", "up_proj"))
        mixed = regroup(torch.cat((gate, up)))
        for name, half in zip(("gate_proj", "up_proj"), mixed.chunk(2), strict=True):
            set_parameter(owner, f"{name}.weight", half)

    return change


def _change_experts(path: str, relation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        owner = module.get_submodule(path)
        set_parameter(owner, "gate_up_proj", relation(owner.get_parameter("gate_up_proj")))

    return change


def _trials(drift: Drift) -> Iterator[Trial]:
    for path, part in parts(drift.source_module, drift.forced):
        if {"gate_proj", "up_proj"} <= part._modules.keys():
            yield Trial("gate-up-swapped", SWAPPED, _swap_children(path), part=path)
            yield Trial("gate-up-swapped", INTERLEAVED, _regroup_children(path, interleave_halves), part=path)
            yield Trial("gate-up-swapped", ALTERNATE, _regroup_children(path, alternate_halves), part=path)
    for path, _ in experts(drift.source_module, drift.forced):
        yield Trial("gate-up-swapped", f"In every expert: {SWAPPED}", _change_experts(path, swap_halves), part=path)
        yield Trial("gate-up-swapped", f"In every expert: {INTERLEAVED}", _change_experts(path, interleave_halves))
        yield Trial("gate-up-swapped", f"In every expert: {ALTERNATE}", _change_experts(path, alternate_halves))


HYPOTHESIS = TrialHypothesis(("gate-up-swapped",), _trials)
