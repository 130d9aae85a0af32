"""The compiled kernels that read a tensor once; without a compiler torch and numpy compute the same, several times
slower."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from porter.kernels.cpu.layout import threads_for
from porter.kernels.cpu.library import KernelLibrary
from porter.kernels.cpu.provider import CpuProvider
from porter.kernels.registry import default_registry


@cache
def kernels() -> KernelLibrary | None:
    """The loaded kernels, compiled at the first call; None where they cannot be."""
    library = _library()
    return library if library.load() is None else None


def measured_by() -> str:
    """What measures tensors here, as a golden's header says it; the reason where it is not the kernels."""
    library = _library()
    reason = library.load()
    return f"cpu kernels ({library.isa})" if reason is None else f"torch ({reason})"


def threads(tensor: Tensor) -> int:
    """How many threads should read the tensor. No result depends on it."""
    return threads_for(tensor.nbytes)


@cache
def _library() -> KernelLibrary:
    provider = default_registry().providers["cpu"]
    return provider.library if isinstance(provider, CpuProvider) else KernelLibrary()
