"""torch_npu, imported when a kernel first needs it: importing it patches torch, and refuses to share a process with
CUDA."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from porter.kernels.contract import Evidence

EMULATED = "porter_emulated_chip"
"""Attribute of the emulator's torch_npu: the chip whose documents it follows."""
TORCH_ALONE = Evidence(
    "declared",
    "torch's own operators, which torch_npu implements on an NPU: no operator of the vendor's is called, so there is "
    "nothing to emulate",
)
"""Of a kernel that makes no call of torch_npu."""


def load_torch_npu() -> Any:
    """The module torch_npu: the emulator's where one is active, else the vendor's. Raises ImportError without it."""
    return sys.modules.get("torch_npu") or import_module("torch_npu")


def device_type() -> str:
    """Where tensors must be for a kernel to take them: "cpu" while the emulator is active, else "npu"."""
    return "cpu" if emulated_chip() is not None else "npu"


def emulated_chip() -> str | None:
    """The chip that is emulated, or None while nothing is."""
    chip: str | None = getattr(sys.modules.get("torch_npu"), EMULATED, None)
    return chip
