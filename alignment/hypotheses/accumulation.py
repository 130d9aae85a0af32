"""A product that adds up its columns in 16 bits, some at a time: each partial sum is rounded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.rounding import HALVES, Format
from porter.alignment.hypotheses.surgery import rebind_forward
from porter.alignment.hypotheses.trial import Change, Trial, TrialHypothesis

COLUMNS = (1, 2, 4, 8, 16, 32, 64, 128)
"""That a kernel may add up exactly before it rounds."""
LONGEST = 512
"""Partial sums that are worth emulating."""


def _in_pieces(columns: int, form: Format) -> Change:
    def change(module: nn.Module) -> None:
        def forward(self: Any, inputs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            total = torch.zeros(*inputs.shape[:-1], self.weight.shape[0], dtype=inputs.dtype, device=inputs.device)
            for given, weight in zip(inputs.split(columns, -1), self.weight.split(columns, -1), strict=True):
                total = form(total + form(given @ weight.t()))
            return total if self.bias is None else form(total + self.bias)

        rebind_forward(module, forward)

    return change


def _trials(drift: Drift) -> Iterator[Trial]:
    module = drift.source_module
    if drift.lane != "native" or not isinstance(module, nn.Linear):
        return  # In float64 nothing is rounded.
    for form in HALVES:
        for columns in (c for c in COLUMNS if c < module.in_features <= c * LONGEST):
            says = f"Its sums are rounded to {form.name} after every {columns} columns: accumulate in float32"
            yield Trial("low-precision", says, _in_pieces(columns, form))


HYPOTHESIS = TrialHypothesis(("low-precision",), _trials)
