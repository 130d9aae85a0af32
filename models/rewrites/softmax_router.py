"""The router whose weights are the largest probabilities of a softmax over all experts."""

from __future__ import annotations

import torch
from torch import nn

from porter.kernels.dispatch import OpCall
from porter.models.rewrite import Candidate, Mismatch, attribute_named

COUNTS = ("top_k", "num_experts_per_tok", "moe_top_k", "topk", "k")


class SoftmaxRouterForward(nn.Module):
    """The ported forward, copied into the generated class."""

    router_weight: torch.Tensor
    router: OpCall
    top_k: int
    renormalize: bool

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        return self.router(flat, self.router_weight, self.top_k, self.renormalize)


class SoftmaxRouter:
    """A weight [experts, hidden], of the module or of its only linear, and a number of experts to choose.

    Whether the chosen weights are divided by their sum is what `norm_topk_prob` says, and where there is no such
    attribute, what the proof finds.
    """

    name = "router"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """Candidates with and without renormalisation; None when the module is no router of this form."""
        top_k = attribute_named(module, COUNTS, int)
        parameters = dict(module.named_parameters())
        buffers = [n for n, b in module.named_buffers() if b.is_floating_point()]
        if top_k is None or not parameters or any(p.dim() > 2 for p in parameters.values()):
            return None
        matrices = [n for n, p in parameters.items() if p.dim() == 2]
        if len(matrices) != 1 or parameters[matrices[0]].shape[0] < getattr(module, top_k):
            return None
        if len(parameters) > 1 or buffers:
            others = sorted([*(parameters.keys() - set(matrices)), *buffers])
            return Mismatch(f"a router, but with {', '.join(others)} beside its weight")
        linear = matrices[0].removesuffix(".weight") if "." in matrices[0] else None
        if linear is not None and not isinstance(getattr(module, linear, None), nn.Linear):
            return Mismatch(f"a router whose weight {matrices[0]} belongs to no linear of its own")
        known = getattr(module, "norm_topk_prob", None)
        choices = [known] if isinstance(known, bool) else [True, False]
        return [
            Candidate(
                rewrite=self.name,
                forward=SoftmaxRouterForward,
                variant="softmax, renormalised" if renormalize else "softmax",
                rename={
                    "router_weight": matrices[0],
                    "top_k": top_k,
                    **({"renormalize": "norm_topk_prob"} if isinstance(known, bool) else {}),
                },
                keep_linear=(linear,) if linear else (),
                append=(
                    *(() if isinstance(known, bool) else (f"self.renormalize = {renormalize}",)),
                    'self.router = OpCall("router", "softmax")',
                ),
            )
            for renormalize in choices
        ]
