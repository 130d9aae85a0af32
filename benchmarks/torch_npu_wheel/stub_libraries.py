"""Libraries that stand for CANN, so that the wheel of torch_npu can be imported on a machine without it.

They define what the wheel's libraries link against and compute nothing: each function returns 0, and two say that there
is one device, number 0, which indexing asks for even on tensors without values. Enough for schemas, Python functions,
the dispatcher and meta kernels; no tensor with values can be made on `npu`.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

SYMBOLS = Path(__file__).with_name("cann_symbols.txt")
"""The undefined symbols of CANN in the libraries of torch_npu 2.13.0, one a line (`nm -D --undefined-only`)."""
ANSWERS = {
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *count) { *count = 1; return 0; }",
    "aclrtGetDevice": "int aclrtGetDevice(int *device) { *device = 0; return 0; }",
}
"""The symbols that do more than to return 0."""
LIBRARIES = ("ascendcl", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
"""The libraries that the wheel's name as needed; each defines all the symbols."""


class StubError(RuntimeError):
    """The stub libraries cannot be built."""


def source(symbols: list[str]) -> str:
    """C source that defines every symbol as a function that returns 0, and ANSWERS as they are."""
    return "".join(ANSWERS.get(symbol, f"long {symbol}(void) {{ return 0; }}") + "\n" for symbol in symbols)


def build(directory: Path, compiler: str = "gcc") -> list[Path]:
    """Compile the libraries into `directory` and return their paths. Raises StubError where that fails."""
    directory.mkdir(parents=True, exist_ok=True)
    text = source(SYMBOLS.read_text(encoding="utf-8").split())
    built = []
    for library in LIBRARIES:
        file = directory / f"lib{library}.c"
        file.write_text(text, encoding="utf-8")
        target = file.with_suffix(".so")
        # -w: some of the names are those of C library functions with another type.
        command = [compiler, "-w", "-shared", "-fPIC", str(file), f"-Wl,-soname,{target.name}", "-o", str(target)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise StubError(f"{compiler}: not found; a C compiler builds the stand-ins for CANN") from error
        except subprocess.CalledProcessError as error:
            raise StubError(f"{' '.join(command)}: {error.stderr.strip()}") from error
        built.append(target)
    return built


def load(libraries: list[Path]) -> None:
    """Load the libraries for all that is loaded later; the wheel's find them by their names."""
    for library in libraries:
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
