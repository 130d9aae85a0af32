"""Memory of the machine: what is free, and giving back what was freed."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch


def available_bytes(device: torch.device) -> int:
    """Memory that is free on the device; 0 where it does not say."""
    if device.type == "cpu":
        lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
        free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        return free[0] if free else 0
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return 0


def give_back() -> None:
    """Return freed memory to the system, where the C library keeps it (glibc does: a model's worth of it)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
