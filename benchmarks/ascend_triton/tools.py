"""The programs that the stage runs: of the wheels triton-ascend and ascendnpu-ir, of LLVM 19."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from porter.kernels import triton as kernels

PACKAGES = ("triton-ascend", "ascendnpu-ir", "torch")
SOURCES = Path(kernels.__file__).parent
"""The kernels."""
BISHENGIR = Path(sysconfig.get_paths()["purelib"]) / "ascendnpuir" / "bin"
LLVM = ("mlir-translate", "clang")
DEBIAN = "apt-get install mlir-19-tools clang-19"


class ToolError(RuntimeError):
    """A program is missing, or failed; the message has what it said."""


def missing() -> list[str]:
    """What is not installed, a line each with what to do."""
    lines = [f"{name} is not installed: make ascend-triton sets it up" for name in PACKAGES if not _version(name)]
    if find_spec("pybind11") is None:
        lines.append("pybind11 is not installed: triton-ascend imports it without declaring it")
    return lines + [f"{name}-19 is not installed: {DEBIAN}" for name in LLVM if _llvm(name) is None]


def versions() -> str:
    """Names and versions of the packages."""
    return ", ".join(f"{name} {_version(name)}" for name in PACKAGES)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _llvm(name: str) -> str | None:
    return shutil.which(f"{name}-19") or shutil.which(f"/usr/lib/llvm-19/bin/{name}")


def run_tool(name: str, *arguments: str | Path) -> str:
    """Output of a program of LLVM 19 or of ascendnpu-ir. Raises ToolError where it fails."""
    program = _llvm(name) if name in LLVM else str(BISHENGIR / name)
    result = subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True, check=False)
    if result.returncode:
        raise ToolError(f"{name}: exit status {result.returncode}: {(result.stderr or result.stdout)[-800:]}")
    return result.stdout
