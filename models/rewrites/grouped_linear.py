"""A linear layer whose weight holds one block of rows for each group of the input."""

from __future__ import annotations

import torch
from torch import nn

from porter.kernels.dispatch import OpCall
from porter.models.rewrite import Candidate, Mismatch


class GroupedLinearForward(nn.Module):
    """The ported forward, copied into the generated class."""

    weight: torch.Tensor
    grouped: OpCall

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.grouped(hidden_states, self.weight)


class GroupedLinear:
    """A kind of torch.nn.Linear with a number of groups."""

    name = "grouped_linear"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """One candidate; None when the module is no linear with groups."""
        groups = getattr(module, "n_groups", getattr(module, "num_groups", None))
        if not isinstance(module, nn.Linear) or type(groups) is not int:
            return None
        if module.bias is not None or module.out_features % groups:
            return Mismatch("a linear layer over groups with a bias, or whose rows do not divide into them")
        return [
            Candidate(
                rewrite=self.name,
                forward=GroupedLinearForward,
                variant="grouped",
                append=('self.grouped = OpCall("linear", "grouped")',),
            )
        ]
