"""routed experts + sigmoid(gate(x)) * shared expert, the gate's product as one Op."""

from __future__ import annotations

import torch
from torch import nn

from porter.kernels.dispatch import OpCall
from porter.models.linear import Linear
from porter.models.rewrite import Candidate, Mismatch

PARTS = frozenset({"gate", "experts", "shared_expert", "shared_expert_gate"})


class SharedExpertForward(nn.Module):
    """The ported forward, copied into the generated class."""

    gate: nn.Module
    experts: nn.Module
    shared_expert: nn.Module
    shared_expert_gate: Linear
    sigmoid_gate: OpCall

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        shared = self.sigmoid_gate(self.shared_expert(flat), self.shared_expert_gate(flat))
        _, weights, indices = self.gate(flat)
        return (self.experts(flat, indices, weights) + shared).view(hidden_states.shape)


class GatedSharedExpert:
    """A router, stacked experts, and an expert for every token with a gate of one row (Qwen2-MoE, Qwen3-Next)."""

    name = "shared_expert"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """One candidate; None when the module has no gated shared expert beside routed ones."""
        children = dict(module.named_children())
        if not {"experts", "shared_expert_gate"} <= children.keys():
            return None
        odd = sorted(children.keys() ^ PARTS)
        if odd:
            return Mismatch(f"a gated shared expert among parts that differ: {', '.join(odd)}")
        gate = children["shared_expert_gate"]
        if not isinstance(gate, nn.Linear) or gate.out_features != 1:
            return Mismatch("a shared expert whose gate is no linear of one row")
        return [
            Candidate(
                rewrite=self.name,
                forward=SharedExpertForward,
                variant="sigmoid gate",
                append=(
                    "# One row: quantizing it would save nothing.",
                    "self.shared_expert_gate.keeps_dtype = True",
                    'self.sigmoid_gate = OpCall("sigmoid_gate", "standard")',
                ),
            )
        ]
