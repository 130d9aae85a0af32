"""The routed experts as one grouped MLP."""

from __future__ import annotations

import torch
from torch import nn

from porter.kernels.dispatch import OpCall
from porter.models.rewrite import Candidate, Mismatch
from porter.models.rewrites.activation_probe import Gated, form_of, large


class ExpertsForward(nn.Module):
    """The ported forward, copied into the generated class."""

    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    gate_up_proj_scale: torch.Tensor
    gate_up_proj_scale_bias: torch.Tensor
    down_proj_scale: torch.Tensor
    down_proj_scale_bias: torch.Tensor
    experts: OpCall

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        weights: tuple[torch.Tensor, ...] = (self.gate_up_proj, self.down_proj)
        if self.gate_up_proj.dtype == torch.int8:
            weights = (self.gate_up_proj, self.gate_up_proj_scale, self.down_proj, self.down_proj_scale)
        if self.experts.variant == "w4a8":
            weights = (*weights[:2], self.gate_up_proj_scale_bias, *weights[2:], self.down_proj_scale_bias)
        return self.experts(hidden_states, top_k_index, top_k_weights, *weights)


class ClampedExpertsForward(ExpertsForward):
    """As ExpertsForward, with the gated activation clamped (DeepSeek-V4)."""

    limit: float

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        weights: tuple[torch.Tensor, ...] = (self.gate_up_proj, self.down_proj)
        if self.gate_up_proj.dtype == torch.int8:
            weights = (self.gate_up_proj, self.gate_up_proj_scale, self.down_proj, self.down_proj_scale)
        return self.experts(hidden_states, top_k_index, top_k_weights, *weights, float(self.limit))


class StackedExperts:
    """Expert weights stacked as gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""

    name = "experts"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """One candidate; None when the module has no stacked expert weights."""
        parameters = dict(module.named_parameters(recurse=False))
        if any(p.dim() == 3 for p in parameters.values()) and set(parameters) != {"gate_up_proj", "down_proj"}:
            return Mismatch(f"stacked expert weights under other names: {', '.join(sorted(parameters))}")
        if set(parameters) != {"gate_up_proj", "down_proj"}:
            return None
        gate_up, down = parameters["gate_up_proj"], parameters["down_proj"]
        if gate_up.dim() != 3 or (gate_up.shape[1], gate_up.shape[2]) != (2 * down.shape[2], down.shape[1]):
            return Mismatch(
                f"expert weights {tuple(gate_up.shape)} and {tuple(down.shape)} are not [E, 2I, H] and [E, H, I]"
            )
        limit = form_on_large_inputs(module, gate_up, down)
        if limit is None:
            return Mismatch("stacked experts that do something else to their activation where this is large")
        variant = "clamped" if limit else "standard"
        return [
            Candidate(
                rewrite=self.name,
                forward=ClampedExpertsForward if limit else ExpertsForward,
                variant=variant,
                rename={} if limit in ("", "limit") else {"limit": limit},
                append=(f'self.experts = OpCall("experts", "{variant}")',),
            )
        ]


def form_on_large_inputs(module: nn.Module, gate_up: torch.Tensor, down: torch.Tensor) -> str | None:
    """As `form_of`, where the first expert's weights are the first of gate_up [E, 2I, H] and down [E, H, I].

    Two tokens go to one expert each: as many choices as any router makes would only add the same form up.
    """
    x = large(module, 2, gate_up.shape[2])
    index = torch.zeros(2, 1, dtype=torch.int64, device=x.device)

    def expected(form: Gated) -> torch.Tensor:
        gate, up = torch.nn.functional.linear(x, gate_up[0]).chunk(2, dim=-1)
        return torch.nn.functional.linear(form(gate, up), down[0])

    return form_of(module, lambda: module(x, index, torch.ones_like(x[:, :1])), expected)
