"""The layout in which matrix units read weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from porter.kernels.ascend.catalogue.rules import absent, one_of, that
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, FRACTAL_NZ, I310P, PAGES, VendorOp

PLAIN = 2
"""The vendor's number of the plain layout."""
ROWS = 16
FRACTAL_COLUMNS: Mapping[torch.dtype, int] = {
    torch.float16: 16,
    torch.bfloat16: 16,
    torch.float32: 16,
    torch.int32: 16,
    torch.int8: 32,
}
"""Columns of one block of FRACTAL_NZ, which has 16 rows."""


def unfit_for_blocks(tensor: torch.Tensor) -> str | None:
    """Why `tensor` cannot be in FRACTAL_NZ where matrix products read it, or None."""
    columns = FRACTAL_COLUMNS.get(tensor.dtype)
    if columns is None:
        return f"{str(tensor.dtype).removeprefix('torch.')} has no blocks"
    if tensor.dim() < 2:
        return "it is no matrix"
    rows, width = tensor.shape[-2:]
    if 1 in (rows, width):
        return "a matrix of one row or column is not read from blocks"
    if rows % ROWS or width % columns:
        return f"its last two dimensions are no multiples of {ROWS} and {columns}"
    return None


OPS = (
    VendorOp(
        name="npu_format_cast",
        schema="(Tensor input, int acl_format, *, int? customize_dtype=None, int? input_dtype=None) -> Tensor",
        page=PAGES
        + "(beta)torch_npu-npu_format_cast.md; one row or column: vllm-ascend issue 10014 (EZ1001); multiples: "
        "sglang PR 21209, of the grouped products that read it",
        chips=(A2, A3, A5, I310P),
        outputs=lambda call: torch.empty_like(call["input"], memory_format=torch.contiguous_format),
        rules=(
            one_of("acl_format", PLAIN, FRACTAL_NZ),
            absent("customize_dtype", "input_dtype"),
            that(
                "of FRACTAL_NZ: f16, bf16, f32, int8 or int32, more than one row and column, rows a multiple of 16, "
                "columns one of 16, of int8 one of 32",
                lambda call: call["acl_format"] != FRACTAL_NZ or unfit_for_blocks(call["input"]) is None,
                "input",
                "acl_format",
            ),
        ),
        nz=("input",),
        note="a copy in another layout; its shape stays",
    ),
)
