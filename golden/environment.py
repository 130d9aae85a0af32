"""Where a golden was recorded: versions, machine, threads and the settings that change how numbers round."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from porter.kernels.ascend.vendor import emulated_chip

_PACKAGES = ("porter", "torch", "transformers", "safetensors", "torch-npu", "triton", "vllm", "sglang")


def environment(device: torch.device) -> dict[str, Any]:
    """JSON-serialisable description of this process as far as it bears on the recorded numbers."""
    return {
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "emulated": emulated_chip(),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def place_in_group() -> dict[str, int]:
    """``rank`` and ``world_size`` of this process in torch's default process group; nothing outside one."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return {}
    return {"rank": distributed.get_rank(), "world_size": distributed.get_world_size()}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
