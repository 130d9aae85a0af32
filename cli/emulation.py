"""`--emulate`: run a port to a chip that this machine does not have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from porter.cli.output import say

EmulateOption = Annotated[
    bool,
    typer.Option(
        "--emulate", help="Run the chip's operators on the CPU, by the vendor's documents; shows no speed."
    ),
]


@contextmanager
def emulation(directory: str | Path, wanted: bool) -> Iterator[None]:
    """Inside, and where `wanted`, the chip of the exported `directory` is emulated.

    Raises PorterError where the directory is no port, or one to a CPU, which needs no emulator.
    """
    if not wanted:
        yield
        return
    from porter.chips.catalogue import load_catalogue
    from porter.emulation import emulating
    from porter.errors import PorterError
    from porter.runtime import read_manifest

    chip = load_catalogue().get(str(read_manifest(directory)["chip"]))
    if chip.device != "npu":
        raise PorterError(f"--emulate: {directory} is a port to {chip.name}, of which there is no emulator")
    with emulating(chip):
        say(f"{chip.name} emulated on the CPU: what its vendor documents, not what the chip was seen to do")
        yield
