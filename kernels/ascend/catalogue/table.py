"""Every operator of the catalogue by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from porter.kernels.ascend.catalogue.norm import OPS as NORM
from porter.kernels.ascend.catalogue.vendor_op import VendorOp


@cache
def catalogue() -> Mapping[str, VendorOp]:
    """The operators by name, in the order of their files. Raises ValueError where two share a name."""
    table: dict[str, VendorOp] = {}
    for op in NORM:
        if op.name in table:
            raise ValueError(f"two entries describe {op.name}")
        table[op.name] = op
    return table
