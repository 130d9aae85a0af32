"""Differences from the wheel that were looked into, and what they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Explained:
    """A difference in `op` whose words contain `contains`: `why` it is no fault of the catalogue or of a kernel."""

    op: str
    contains: str
    why: str

    def fits(self, op: str, words: str) -> bool:
        """Whether this is the difference."""
        return op == self.op and self.contains in words


EXPLAINED = (
    Explained(
        "npu_grouped_matmul_swiglu_quant_v2",
        "2 results; the vendor's meta kernel gives 0",
        "the wheel's meta kernel has no branch for packed int4 weights with a scale for each group of rows and gives "
        "nothing; op-plugin's own code allocates what the catalogue says. torch.compile cannot trace such a call",
    ),
)
