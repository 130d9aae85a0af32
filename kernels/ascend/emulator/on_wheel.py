"""The emulator's second mode: on the vendor's own torch_npu. Functions, schemas and dispatcher are the vendor's, only
the kernels for CPU tensors are the emulator's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from porter.kernels.ascend.catalogue.table import catalogue
from porter.kernels.ascend.catalogue.vendor_op import A2
from porter.kernels.ascend.emulator.stand_in import NAMESPACE, Emulator
from porter.kernels.ascend.vendor import EMULATED


@contextmanager
def emulated_on_wheel(chip: str = A2) -> Iterator[Emulator]:
    """Inside, the operators of the torch_npu that is imported take CPU tensors, as `chip` computes.

    Nothing is declared: an operator that the wheel has not, or an argument that its schema has not, fails as on the
    chip. Which arguments a caller left out is not checked, as the vendor's functions do not tell; `emulated_npu` does.
    Raises RuntimeError where the vendor's torch_npu is not loaded. Nothing of it is left afterwards.
    """
    vendor = sys.modules.get("torch_npu")
    if vendor is None or hasattr(vendor, EMULATED):
        raise RuntimeError("the vendor's own torch_npu is not loaded, or is emulated already")
    emulator = Emulator(chip)
    library = torch.library.Library(NAMESPACE, "IMPL")
    for op in catalogue().values():
        if torch._C._jit_get_schemas_for_operator(f"{NAMESPACE}::{op.name}"):
            library.impl(op.name, emulator.kernel(op), "CPU")
    get_npu_format = vendor.get_npu_format
    vendor.get_npu_format = emulator.formats.of  # type: ignore[attr-defined]
    setattr(vendor, EMULATED, chip)
    try:
        yield emulator
    finally:
        delattr(vendor, EMULATED)
        vendor.get_npu_format = get_npu_format  # type: ignore[attr-defined]
        library._destroy()
