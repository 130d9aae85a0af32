"""Recording the kernels that one step of a model calls, and running them again without Python in between."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from porter.kernels.cpu.library import RECORDED, KernelLibrary

SLOTS = 16
"""Slots of 8 bytes per command: the code of the kernel, then its arguments. As in program.cpp."""

Argument = int | float | bool | bytes | None

_one_recording = threading.RLock()


class Program:
    """Kernel calls in order, with the memory that they read and write.

    After `finish()` the commands and the arrays that their arguments point to are int64 values in `memory`; between
    runs callers may change any of them: an address, a number of threads, or a length in an array.
    """

    memory: torch.Tensor

    def __init__(self, library: KernelLibrary) -> None:
        self.library = library
        self.names: list[str] = []
        self.kept: list[torch.Tensor] = []
        self._values: list[list[int]] = []
        self._arrays: list[tuple[int, int, tuple[int, ...]]] = []
        self._starts: dict[tuple[int, int], int] = {}

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep alive memory that recorded kernels point to."""
        self.kept.append(tensor)

    def append(self, name: str, arguments: tuple[Argument, ...]) -> None:
        """Add a call of the kernel `name`; bytes are arrays of int64, passed by address."""
        row = [RECORDED.index(name)]
        for argument in arguments:
            if isinstance(argument, bytes):
                self._arrays.append((len(self.names), len(row), struct.unpack(f"{len(argument) // 8}q", argument)))
                row.append(0)
            elif isinstance(argument, float):
                row.append(struct.unpack("q", struct.pack("d", argument))[0])
            else:
                row.append(int(argument or 0))
        self.names.append(name)
        self._values.append(row + [0] * (SLOTS - len(row)))

    def finish(self) -> None:
        """No more calls: lay out the memory that `run` reads."""
        values = [value for row in self._values for value in row]
        for command, slot, array in self._arrays:
            self._starts[command, slot] = len(values)
            values += array
        self.memory = torch.tensor(values, dtype=torch.int64)
        for place, start in self._starts.items():
            self.memory[self.argument(*place)] = self.memory.data_ptr() + 8 * start

    def reads(self, first: int, last: int) -> bool:
        """Whether an argument is an address in [first, last)."""
        return any(first <= value < last for row in self._values for value in row[1:])

    def value(self, command: int, slot: int) -> int:
        """An argument as it was recorded."""
        return self._values[command][slot]

    def argument(self, command: int, slot: int) -> int:
        """Where in `memory` an argument stands; slot 1 is the first."""
        return command * SLOTS + slot

    def array(self, command: int, slot: int) -> int:
        """Where in `memory` the array begins that an argument points to."""
        return self._starts[command, slot]

    def run(self) -> None:
        """Call the kernels, on the values that their memory holds now."""
        self.library.run(self.memory.data_ptr(), len(self.names))


@contextmanager
def recording(library: KernelLibrary, program: Program) -> Iterator[None]:
    """Within the context every kernel call of this thread is executed, and appended to `program`.

    Calls of other threads are executed alone; a recording in another thread is waited for.
    """
    thread = threading.get_ident()

    def recorded(name: str, kernel: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Argument) -> None:
            if threading.get_ident() == thread:
                program.append(name, arguments)
            kernel(*arguments)

        return call

    with _one_recording:
        originals = {name: getattr(library, name) for name in RECORDED}
        try:
            for name, kernel in originals.items():
                setattr(library, name, recorded(name, kernel))
            yield
        finally:
            for name, kernel in originals.items():
                setattr(library, name, kernel)
