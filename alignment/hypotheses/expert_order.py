"""Experts reached under the wrong index: a shifted count, a rank's own numbering."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import experts
from porter.alignment.hypotheses.surgery import rebind_forward, set_parameter
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


        for words, places in ROWS:
            says = f"The experts' rows are added up {words}: take the index as the operator before it writes it"
            yield Trial("expert-permutation", says, _added_up(path, places), part=path)


Places = Callable[[torch.Tensor], torch.Tensor]


def _scattered(index: torch.Tensor) -> torch.Tensor:
    order = index.flatten().argsort(stable=True)
    return order[order]


def _by_columns(index: torch.Tensor) -> torch.Tensor:
    tokens, chosen = index.shape
    pairs: torch.Tensor = torch.arange(tokens * chosen, device=index.device).view(chosen, tokens).t()
    return pairs.reshape(-1)


ROWS: tuple[tuple[str, Places], ...] = (
    ("by where they came from instead of where they went", _scattered),
    ("by an index that is read by columns instead of by rows", _by_columns),
)
"""How an index of sorted rows is misread: for each token's k-th expert, of which token and expert the row is taken."""


def _added_up(path: str, places: Places) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        owner = module.get_submodule(path)
        original = owner.forward

        def forward(self: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
            tokens, chosen = index.shape
            ones = weights.new_ones(tokens * chosen, 1)
            rows = original(hidden.repeat_interleave(chosen, 0), index.reshape(-1, 1), ones)
            taken = rows[places(index)].view(tokens, chosen, -1)
            return (weights.to(rows.dtype).unsqueeze(-1) * taken).sum(1)

        rebind_forward(owner, forward)

    return change


HYPOTHESIS = TrialHypothesis(("expert-permutation", "expert-count-offset"), _trials)
