"""The dtype that a port computes in, by its scheme, the user's word and what the chip has."""

from __future__ import annotations

from typing import Any

import torch

from porter.chips.catalogue import Chip
from porter.errors import PorterError

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def default_scheme(config: Any) -> str:
    """fp32 for a model whose config says float32, bf16 for any other."""
    return "fp32" if getattr(config, "dtype", None) in (torch.float32, "float32") else "bf16"


def dtype_written(config: Any, scheme: str) -> str | None:
    """What a directory that porter wrote in that scheme computes in; None for any other config."""
    if (getattr(config, "porter", None) or {}).get("scheme") != scheme:
        return None
    stored = str(config.dtype).removeprefix("torch.")
    return next((name for name, dtype in DTYPES.items() if str(dtype) == f"torch.{stored}"), None)


def float_dtype(scheme: str, dtype: str | None, chip: Chip) -> torch.dtype:
    """What a port in `scheme` computes in, as `dtype` says where it is given. Raises PorterError where that is no such
    dtype, one that the chip lacks, or another than the scheme's."""
    name = dtype or (scheme if scheme in DTYPES else "bf16")
    if name not in DTYPES:
        raise PorterError(f"--dtype {name}: ports compute in {' or '.join(DTYPES)}")
    for held in (DTYPES[name], DTYPES.get(scheme, DTYPES[name])):
        if (wanted := str(held).removeprefix("torch.")) not in chip.dtypes:
            asked = f"--dtype {dtype}" if dtype and held == DTYPES[name] else f"--scheme {scheme}"
            others = [other for other, each in DTYPES.items() if str(each).removeprefix("torch.") in chip.dtypes]
            instead = f"; give --scheme {others[0]}" if others else ""
            raise PorterError(f"{asked}: {chip.name} has no {wanted} (it has {', '.join(chip.dtypes)}){instead}")
    if DTYPES.get(scheme) == torch.float32 != DTYPES[name]:
        raise PorterError(f"--dtype {name} contradicts --scheme {scheme}; leave one of them out")
    return DTYPES[name]
