"""Routers of sigmoid scores, whose correction bias only chooses: within groups, or of all experts."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from porter.kernels.dispatch import OpCall
from porter.models.rewrite import Candidate, Mismatch


class GroupedSigmoidForward(nn.Module):
    """The ported forward, copied into the generated class."""

    weight: torch.Tensor
    e_score_correction_bias: torch.Tensor
    router: OpCall
    top_k: int
    num_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.router(
            hidden_states.reshape(-1, hidden_states.shape[-1]),
            self.weight,
            self.e_score_correction_bias,
            self.top_k,
            self.num_group,
            self.topk_group,
            self.norm_topk_prob,
            self.routed_scaling_factor,
        )


class GroupedSigmoidRouter:
    """Sigmoid scores, a bias that only chooses, the best groups, then the best experts (DeepSeek-V3)."""

    name = "router"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """One candidate; None when the module has no correction bias."""
        if not isinstance(getattr(module, "e_score_correction_bias", None), torch.Tensor):
            return None
        wanted = ("top_k", "num_group", "topk_group", "norm_topk_prob", "routed_scaling_factor")
        missing = [a for a in wanted if not hasattr(module, a)]
        if missing:
            return Mismatch(f"a router with a correction bias, but no attribute {', '.join(missing)}")
        return [
            Candidate(
                rewrite=self.name,
                forward=GroupedSigmoidForward,
                variant="grouped_sigmoid",
                append=('self.router = OpCall("router", "grouped_sigmoid")',),
            )
        ]


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
    """Sigmoid scores, a bias that the caller holds and that only chooses, the best experts of all (MiniMax-M2)."""

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
