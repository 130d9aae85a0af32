"""The providers that porter ships, and what an Op runs on until it is bound. An export replaces this file by one that
names its own chip and provider."""

from __future__ import annotations

from porter.kernels.ascend.provider import AscendProvider
from porter.kernels.contract import Provider
from porter.kernels.cpu.provider import CpuProvider

DEFAULT_CHIP = "cpu"
DEFAULT_PROVIDERS: tuple[str, ...] = ("cpu",)


def make_providers() -> list[Provider]:
    """A fresh one of each."""
    return [CpuProvider(), AscendProvider()]
