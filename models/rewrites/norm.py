"""norm(x) -> rms_norm; norm(x + residual) -> add_rms_norm."""

from __future__ import annotations

import torch
from torch import nn

from porter.kernels.dispatch import OpCall
from porter.models.rewrite import Candidate, Mismatch

EPSILONS = ("variance_epsilon", "eps", "epsilon")
LARGEST_EPSILON = 1e-2


class RMSNormForward(nn.Module):
    """The ported forward, copied into the generated class."""

    weight: torch.Tensor
    variance_epsilon: float
    rms_norm: OpCall
    add_rms_norm: OpCall

    def forward(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return self.rms_norm(hidden_states, self.weight, self.variance_epsilon)
        return self.add_rms_norm(hidden_states, residual, self.weight, self.variance_epsilon)


class RMSNorm:
    """x * rsqrt(mean(x^2) + eps) * w, or * (1 + w): which of the two, the proof decides."""

    name = "rms_norm"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """One candidate per variant for a module with a single 1-D weight and an epsilon; None when it is no norm."""
        parameters = dict(module.named_parameters())
        if len(parameters) != 1 or any(p.dim() != 1 for p in parameters.values()) or any(module.children()):
            return None
        if any(True for _ in module.buffers()):
            return Mismatch("one 1-D weight as in an RMSNorm, but a buffer beside it")
        (weight,) = parameters
        group = getattr(module, "group_size", None)
        if isinstance(group, int) and group < parameters[weight].numel():
            return Mismatch(f"an RMSNorm over groups of {group}; the Op takes the whole last dimension")
        # An attribute of any name may be the epsilon, if it is as small as one.
        small = [n for n, value in vars(module).items() if isinstance(value, float) and 0 < value <= LARGEST_EPSILON]
        epsilon = next((n for n in (*EPSILONS, *small) if isinstance(getattr(module, n, None), float)), None)
        if epsilon is None:
            return Mismatch("one 1-D weight as in an RMSNorm, but no float attribute variance_epsilon, eps or epsilon")
        return [
            Candidate(
                rewrite=self.name,
                forward=RMSNormForward,
                variant=variant,
                rename={"weight": weight, "variance_epsilon": epsilon},
                append=(
                    f'self.rms_norm = OpCall("rms_norm", "{variant}")',
                    f'self.add_rms_norm = OpCall("add_rms_norm", "{variant}")',
                ),
            )
            for variant in ("standard", "zero_centered")
        ]
