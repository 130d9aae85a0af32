"""Linalg IR compiled for x86 and run: bishengir-opt lowers it to LLVM, clang compiles, ctypes calls it."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import re
from pathlib import Path
from typing import Any

import torch

from benchmarks.ascend_triton.frontend import Lowered
from benchmarks.ascend_triton.tools import run_tool

PASSES = (
    "--annotation-lowering",
    "--convert-elementwise-to-linalg",
    "--one-shot-bufferize=allow-return-allocs-from-loops bufferize-function-boundaries=true "
    "function-boundary-type-conversion=identity-layout-map",
    "--canonicalize",
    "--convert-linalg-to-loops",
    "--convert-bufferization-to-memref",
    "--expand-strided-metadata",
    "--memref-expand",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--arith-expand=include-bf16=true",
    "--convert-vector-to-llvm",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--convert-index-to-llvm",
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
)
SCALARS: dict[str, Any] = {"i32": ctypes.c_int32, "fp32": ctypes.c_float}
RUNTIME = Path(__file__).with_name("memref_copy.c")
OPTIONS = ("-O2", "-march=native", "-Wno-override-module", "-shared", "-fPIC")
ATTRIBUTES = re.compile(r" attributes \{.*\}(?= \{$|$)| \{(?:hacc|hivm|tt)\.[^{}]*\}")


class CpuKernel:
    """One kernel as a function of this machine. Building takes about a second; the result is kept under `work`."""

    def __init__(self, lowered: Lowered, work: Path) -> None:
        digest = hashlib.sha256(lowered.linalg.encode()).hexdigest()[:16]
        path = work / f"{lowered.kernel}.{digest}.so"
        if not path.exists():
            _build(lowered, path)
        self._function = getattr(ctypes.CDLL(str(path)), lowered.kernel)
        self._function.restype = None
        self._signature, self._leading = lowered.signature, lowered.leading

    def __call__(self, grid: tuple[int, ...], arguments: dict[str, torch.Tensor | int | float]) -> None:
        """Run each program of the grid in turn. Tensors pass the address of their first element."""
        # Two buffers that kernels of the matrix unit use for synchronisation.
        passed: list[Any] = [*[ctypes.c_int64(0)] * self._leading, *_address(None), *_address(None)]
        for name, kind in self._signature.items():
            value = arguments[name]
            passed += _address(value) if isinstance(value, torch.Tensor) else [SCALARS[kind](value)]
        sizes = (*grid, 1, 1)[:3]
        shape = [ctypes.c_int32(size) for size in sizes]
        for program in itertools.product(*map(range, sizes)):
            self._function(*passed, *shape, *(ctypes.c_int32(axis) for axis in program))


def _address(tensor: torch.Tensor | None) -> list[ctypes.c_int64]:
    """A memref of rank 1: two pointers, offset, size, stride."""
    address, size = (0, 0) if tensor is None else (tensor.data_ptr(), tensor.numel())
    return [ctypes.c_int64(number) for number in (address, address, 0, size, 1)]


def _build(lowered: Lowered, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source, dialect, llvm = (target.with_suffix(suffix) for suffix in (".mlir", ".llvm.mlir", ".ll"))
    source.write_text(lowered.linalg, encoding="utf-8")
    run_tool("bishengir-opt", source, *lowered.passes, *PASSES, "-o", dialect)
    dialect.write_text(_plain(dialect.read_text(encoding="utf-8")), encoding="utf-8")
    run_tool("mlir-translate", "--mlir-to-llvmir", dialect, "-o", llvm)
    run_tool("clang", *OPTIONS, llvm, RUNTIME, "-lm", "-o", target)


def _plain(text: str) -> str:
    """The module without the vendor's attributes, which LLVM's own translator does not know."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if line.startswith("module attributes"):
            lines[number] = "module {"
        elif "llvm.func" in line:
            lines[number] = ATTRIBUTES.sub("", line)
    return "\n".join(lines)
