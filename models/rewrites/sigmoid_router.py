"""The router of sigmoid scores without groups, whose correction bias its caller holds (MiniMax-M2)."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from porter.kernels.dispatch import OpCall
from porter.models.rewrite import Candidate, Mismatch


class SigmoidRouterForward(nn.Module):
    """The ported forward, copied into the generated class."""

    weight: torch.Tensor
    router: OpCall
    top_k: int

    def forward(
        self, hidden_states: torch.Tensor, e_score_correction_bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        # One group, which is always kept; the chosen scores are divided by their sum.
        return self.router(flat, self.weight, e_score_correction_bias, self.top_k, 1, 1, True, 1.0)


class SigmoidRouter:
    """Sigmoid scores, a bias given from outside that only chooses, the best experts of all."""

    name = "router"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """One candidate; None when the module is no router that takes its bias as an argument."""
        parameters = dict(module.named_parameters())
        taken = list(inspect.signature(type(module).forward).parameters)
        if len(taken) != 3 or "bias" not in taken[2] or [p.dim() for p in parameters.values()] != [2]:
            return None
        if "weight" not in parameters or type(getattr(module, "top_k", None)) is not int:
            return Mismatch("a router that takes its bias as an argument, but no attribute weight or top_k")
        return [
            Candidate(
                rewrite=self.name,
                forward=SigmoidRouterForward,
                variant="sigmoid",
                append=('self.router = OpCall("router", "grouped_sigmoid")',),
            )
        ]
