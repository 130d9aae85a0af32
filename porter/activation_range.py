"""The range of an activation, and the one scale and offset with which int8 holds it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOWEST, HIGHEST = -128, 127
STEPS = HIGHEST - LOWEST
"""Between the codes of the smallest and the largest value: every code is used."""
SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Range:
    """The smallest and largest value that the input of a linear layer took; zero is always within."""

    low: float
    high: float

    def joined(self, other: Range) -> Range:
        """The range of both."""
        return Range(min(self.low, other.low), max(self.high, other.high))

    def parameters(self) -> tuple[Tensor, Tensor]:
        """(input_scale float32 [1], input_offset int8 [1]) of msmodelslim's asymmetric per-tensor quantization.

        scale = (high - low) / 255 and offset = round(-128 - low / scale): low has the code -128, high 127, and zero,
        which padding and gates produce exactly, an integer. An input that was always zero has scale 1 and offset 0.
        """
        scale = torch.tensor([max((self.high - self.low) / STEPS, SMALLEST)], dtype=torch.float32)
        if self.low == self.high:
            return torch.ones(1), torch.zeros(1, dtype=torch.int8)
        offset = round(LOWEST - self.low / float(scale))
        return scale, torch.tensor([min(max(offset, LOWEST), HIGHEST)], dtype=torch.int8)
