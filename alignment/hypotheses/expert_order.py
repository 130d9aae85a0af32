"""Experts reached under the wrong index: a shifted count, a rank's own numbering."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import experts
from porter.alignment.hypotheses.surgery import set_parameter
from porter.alignment.hypotheses.trial import Trial, TrialHypothesis

PARAMETERS = ("gate_up_proj", "down_proj")


def _reindex(path: str, order: torch.Tensor, names: tuple[str, ...]) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        owner = module.get_submodule(path)
        for name in names:
            set_parameter(owner, name, owner.get_parameter(name).index_select(0, order))

    return change


def _trials(drift: Drift) -> Iterator[Trial]:
    for path, part in experts(drift.source_module, drift.forced):
        index = torch.arange(part.get_parameter("gate_up_proj").shape[0])
        for shift in (1, -1):
            says = f"Expert i is reached as i {-shift:+d}: the experts are counted from another origin"
            yield Trial("expert-count-offset", says, _reindex(path, index.roll(shift), PARAMETERS), part=path)
        says = "Experts are in reverse order: restore the order of the source"
        yield Trial("expert-permutation", says, _reindex(path, index.flip(0), PARAMETERS), part=path)
        for ranks in (r for r in (2, 4, 8) if len(index) % r == 0 and len(index) > r):
            for order in (index.view(ranks, -1).t().reshape(-1), index.view(-1, ranks).t().reshape(-1)):
                says = f"Experts are numbered round-robin over {ranks} ranks where the source numbers them in blocks"
                yield Trial("expert-permutation", says, _reindex(path, order, PARAMETERS), part=path)
        for name in PARAMETERS:
            says = f"{name} of the experts is shifted by one against the other projection: realign the two"
            yield Trial("expert-permutation", says, _reindex(path, index.roll(1), (name,)), part=path)
            yield Trial("expert-permutation", says, _reindex(path, index.roll(-1), (name,)), part=path)


HYPOTHESIS = TrialHypothesis(("expert-permutation", "expert-count-offset"), _trials)
