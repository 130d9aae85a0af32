"""norm(x) * silu(gate) -> rms_norm/gated."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from porter.kernels.dispatch import OpCall
from porter.models.rewrite import Candidate, Mismatch, attribute_named
from porter.models.rewrites.norm import EPSILONS


class GatedRMSNormForward(nn.Module):
    """The ported forward, copied into the generated class."""

    weight: torch.Tensor
    variance_epsilon: float
    gated_rms_norm: OpCall

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.gated_rms_norm(hidden_states, self.weight, gate, self.variance_epsilon)


class GatedRMSNorm:
    """A norm whose forward takes a second tensor, the gate."""

    name = "gated_rms_norm"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """One candidate; None when the module is no norm, or its forward takes one tensor."""
        parameters = dict(module.named_parameters())
        if list(parameters) != ["weight"] or parameters["weight"].dim() != 1 or any(module.children()):
            return None
        if list(inspect.signature(module.forward).parameters)[:2] != ["hidden_states", "gate"]:
            return None
        epsilon = attribute_named(module, EPSILONS, float)
        if epsilon is None:
            return Mismatch(f"a gated norm, but no float attribute {', '.join(EPSILONS)}")
        activation = getattr(module, "activation", "silu")
        if activation != "silu":
            return Mismatch(f"a norm gated by {activation}; the Op gates by silu")
        return [
            Candidate(
                rewrite=self.name,
                forward=GatedRMSNormForward,
                variant="silu",
                rename={"variance_epsilon": epsilon},
                append=('self.gated_rms_norm = OpCall("rms_norm", "gated")',),
            )
        ]
