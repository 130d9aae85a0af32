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
    Explained(
        "npu_grouped_matmul",
        "refused: RuntimeError: ('The output dtype ', '1'",
        "the page lists int8 as output_dtype of int8 products with int64 scales, and op-plugin's code takes it; the "
        "wheel's meta kernel does not, so torch.compile cannot trace such a call. No kernel of porter's makes it",
    ),
    Explained(
        "npu_mhc_pre",
        "result 3 float32[0]",
        "with out_flag=0 the chip writes the first three results alone; op-plugin's code leaves the rest undefined, "
        "the wheel's meta kernel gives them shapes, and the emulator makes them empty. Nothing reads them",
    ),
    Explained(
        "npu_mhc_sinkhorn",
        "3 results; the vendor's meta kernel gives 1",
        "with out_flag=0 the last two results are undefined on the chip and None from the meta kernel; the emulator "
        "makes them empty. Nothing reads them",
    ),
)
