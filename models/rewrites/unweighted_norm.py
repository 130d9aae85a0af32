"""x * rsqrt(mean(x^2) + eps), without a weight."""

from __future__ import annotations

import torch
from torch import nn

from porter.kernels.dispatch import OpCall
from porter.models.proof import CANNOT_RUN
from porter.models.rewrite import Candidate, Mismatch
from porter.models.rewrites.norm import LARGEST_EPSILON


class UnweightedNormForward(nn.Module):
    """The ported forward, copied into the generated class."""

    eps: float
    rms_norm: OpCall

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.rms_norm(hidden_states, self.eps)


class UnweightedRMSNorm:
    """A module with an epsilon and nothing else, that normalises by the root mean square, judged by its values."""

    name = "unweighted_rms_norm"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """One candidate; None when the module has tensors or children, or computes something else."""
        if [*module.parameters(), *module.buffers(), *module.children()]:
            return None
        small = [n for n, v in vars(module).items() if isinstance(v, float) and 0 < v <= LARGEST_EPSILON]
        if len(small) != 1 or not _normalises(module, getattr(module, small[0])):
            return None
        return [
            Candidate(
                rewrite=self.name,
                forward=UnweightedNormForward,
                variant="unweighted",
                rename={} if small[0] == "eps" else {"eps": small[0]},
                append=('self.rms_norm = OpCall("rms_norm", "unweighted")',),
            )
        ]


def _normalises(module: nn.Module, eps: float) -> bool:
    x = torch.linspace(-1, 3, 12).view(1, 2, 6) * 1e-2
    try:
        output = module(x)
    except CANNOT_RUN:
        return False
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return isinstance(output, torch.Tensor) and output.shape == x.shape and torch.allclose(output, expected, rtol=1e-4)
