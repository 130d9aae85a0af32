"""Run what was ported to a chip that is not there: its vendor's operators by their documents, on the CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from porter.chips.catalogue import Chip, load_catalogue
from porter.errors import PorterError
from porter.kernels.ascend.emulator.stand_in import emulated_npu
from porter.kernels.ascend.vendor import emulated_chip


@contextmanager
def emulating(chip: Chip | str) -> Iterator[None]:
    """Inside, kernels of `chip`, or of the chip of that name, run on the CPU. Nothing happens for CPUs, on a machine
    that has the chip's own device, and where an emulator of the chip is active already.

    Raises PorterError for an unknown name, and where another chip is emulated already.
    """
    chip = load_catalogue().get(chip) if isinstance(chip, str) else chip
    active = emulated_chip()
    if active is not None and active != chip.name:
        raise PorterError(f"{active} is emulated in this process already; {chip.name} needs another process")
    if chip.device != "npu" or active is not None or has_npu():
        yield
        return
    with emulated_npu(chip.name):
        yield


def device_to_run_on(chip: Chip, directory: Path) -> str:
    """The torch device for a port to `chip`: "cpu" for CPUs and while the chip is emulated, else the chip's own.

    Raises PorterError where the device is not there, or another chip is emulated.
    """
    if chip.device == "cpu" or emulated_chip() == chip.name:
        return "cpu"
    if emulated_chip() is not None:
        raise PorterError(f"{directory}: is a port to {chip.name}, and {emulated_chip()} is emulated in this process")
    if chip.device == "npu" and has_npu():
        return chip.device
    raise PorterError(
        f"{directory}: is a port to {chip.name}, and this machine has no {chip.extension or chip.device}; run it "
        "there, or pass --emulate (in Python: with porter.emulation.emulating) to run its operators on the CPU by the "
        "vendor's documents"
    )


def has_npu() -> bool:
    """Whether torch_npu is installed and the emulator is not in its place."""
    return emulated_chip() is None and importlib.util.find_spec("torch_npu") is not None
