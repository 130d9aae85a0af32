"""Logits against logits: top-1 agreement, KL divergence, first diverging position."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from porter.alignment.report import Tokens

ROWS = 256
"""Positions per piece: float64 log-probabilities over a large vocabulary are wide."""


@dataclass
class TokenCount:
    """Accumulates positions; `add` them in order, then ask for `result`."""

    compared: int = 0
    agreed: int = 0
    kl_sum: float = 0.0
    kl_max: float = 0.0
    first_divergence: int | None = None

    def add(self, candidate: Tensor, golden: Tensor) -> None:
        """Logits [positions, vocabulary] of both. KL is of the candidate from the golden, in nats, per position."""
        for start in range(0, golden.shape[0], ROWS):
            mine = candidate[start : start + ROWS].detach().to("cpu", torch.float64)
            theirs = golden[start : start + ROWS].detach().to("cpu", torch.float64)
            # The largest of logits with a NaN among them is the NaN: no token was chosen.
            agree = (mine.argmax(dim=-1) == theirs.argmax(dim=-1)) & ~mine.isnan().any(dim=-1)
            if self.first_divergence is None and not bool(agree.all()):
                self.first_divergence = self.compared + int((~agree).nonzero()[0])
            log_p, log_q = theirs.log_softmax(dim=-1), mine.log_softmax(dim=-1)
            # A token of probability zero contributes nothing, whatever its logarithm.
            kl = torch.where(log_p.isinf(), 0.0, log_p.exp() * (log_p - log_q)).sum(dim=-1).clamp_min(0.0)
            kl = kl.nan_to_num(nan=math.inf, posinf=math.inf)
            self.compared += int(agree.numel())
            self.agreed += int(agree.sum())
            self.kl_sum += float(kl.sum())
            self.kl_max = max(self.kl_max, float(kl.max()))

    def result(self) -> Tokens | None:
        """The report's section; None where no position was compared."""
        if not self.compared:
            return None
        mean = self.kl_sum / self.compared
        return Tokens(self.compared, self.agreed / self.compared, mean, self.kl_max, self.first_divergence)
