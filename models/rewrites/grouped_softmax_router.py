"""DeepSeek-V2's router: the largest softmax scores, of all experts or of those in the best groups."""

from __future__ import annotations

import torch
from torch import nn

from porter.kernels.dispatch import OpCall
from porter.models.rewrite import Candidate, Mismatch

METHODS = ("greedy", "group_limited_greedy")
READS = ("top_k", "num_group", "topk_group", "routed_scaling_factor")


class GroupedSoftmaxForward(nn.Module):
    """The ported forward, copied into the generated class."""

    weight: torch.Tensor
    router: OpCall
    top_k: int
    groups: tuple[int, int]
    routed_scaling_factor: float

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        return self.router(flat, self.weight, self.top_k, *self.groups, self.routed_scaling_factor)


class GroupedSoftmaxRouter:
    """A router that chooses by `topk_method`, and scales the weights instead of dividing them by their sum."""

    name = "router"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """One candidate; None when the module has no `topk_method`, or a bias that chooses."""
        method = getattr(module, "topk_method", None)
        if method is None or hasattr(module, "e_score_correction_bias"):
            return None
        missing = [name for name in READS if not hasattr(module, name)]
        if missing or [n for n, _ in module.named_parameters()] != ["weight"]:
            return Mismatch(f"a router by topk_method, but without {', '.join(missing) or 'a single weight'}")
        if method not in METHODS:
            return Mismatch(f"a router whose topk_method is {method!r}, neither {' nor '.join(METHODS)}")
        limited = method == "group_limited_greedy"
        return [
            Candidate(
                rewrite=self.name,
                forward=GroupedSoftmaxForward,
                variant="grouped_softmax" if limited else "softmax, scaled",
                append=(
                    f"self.groups = {'(self.num_group, self.topk_group)' if limited else '(1, 1)'}",
                    'self.router = OpCall("router", "grouped_softmax")',
                ),
            )
        ]
