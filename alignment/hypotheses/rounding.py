"""Storage formats narrower than float64, emulated in float64: what a tensor becomes when it is kept in one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from porter.alignment.hypotheses.low_precision import round_to


@dataclass(frozen=True)
class Format:
    """A floating-point format: significant bits (the leading one counted), largest value, exponent of the finest step.

    Values beyond the largest become infinite, or the largest where the format saturates.
    """

    name: str
    bits: int
    largest: float
    finest: int
    saturates: bool = False

    @property
    def resolves(self) -> float:
        """The relative distance below which two orders of the same roundings cannot be told apart: an eighth of a unit
        in the last place, as when one value in a dozen falls to the other side."""
        return 2.0 ** -(self.bits + 2)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """`values` rounded to nearest even, in float64; values below the normal range to the format's finest step."""
        values = values.to(torch.float64)
        step = 2.0**self.finest
        small = values.abs() < step * 2.0 ** (self.bits - 1)
        rounded = torch.where(small, (values / step).round() * step, round_to(values, self.bits))
        over = rounded.abs() > self.largest
        beyond = self.largest if self.saturates else torch.inf
        return torch.where(over, values.sign() * beyond, rounded)


def held_in(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` as a tensor of `dtype`, also where a surrounding float64_mode widens every conversion: arithmetic on it
    is the machine's own."""
    integers = {2: torch.int16, 4: torch.int32}[torch.finfo(dtype).bits // 8]
    return torch.empty(values.shape, dtype=integers, device=values.device).view(dtype).copy_(values)


BFLOAT16 = Format("bfloat16", 8, 3.3895313892515355e38, -133)
FLOAT16 = Format("float16", 11, 65504.0, -24)
E4M3 = Format("float8 e4m3", 4, 448.0, -9, saturates=True)
E5M2 = Format("float8 e5m2", 3, 57344.0, -16, saturates=True)
FLOAT32 = Format("float32", 24, 3.4028234663852886e38, -149)

OF_DTYPE = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.float32: FLOAT32}
"""The format of a computing dtype; float64 has none, it rounds nothing here."""
HALVES = (BFLOAT16, FLOAT16)
EIGHTHS = (E4M3, E5M2)


def narrower_than(dtype: torch.dtype) -> tuple[Format, ...]:
    """The 16-bit formats that hold less than `dtype` does."""
    own = OF_DTYPE.get(dtype)
    return tuple(each for each in HALVES if own is None or each.bits < own.bits or each.largest < own.largest)
