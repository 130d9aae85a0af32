"""Linalg IR through the open part of Ascend's compiler: to HIVM with its memory planned, short of closed `hivmc`."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.ascend_triton.tools import BISHENGIR, ToolError

if TYPE_CHECKING:
    # It imports triton, which reading a plan does not need.
    from benchmarks.ascend_triton.frontend import Lowered

TARGETS = ("Ascend910B3", "Ascend910_9392")
"""Atlas A2 and A3."""
OPTIONS = (
    "--enable-auto-multi-buffer=true",
    "--enable-auto-bind-sub-block=true",
    "--enable-hfusion-compile=true",
    "--enable-triton-kernel-compile=true",
    "--enable-hivm-compile=true",
)
LAST = "External hivmc run fails, returning module before running external compiler"
"""What the compiler says when everything of it that is open has passed."""
OVERFLOW = re.compile(r"\w+ overflow, requires \d+ bits while \d+ bits available")
RETRY = re.compile(r"overflow detected; automatically set ([\w-]+) to false")
SPACES = {"ub": "UB_SIZE", "cbuf": "L1_SIZE", "cc": "L0C_SIZE"}
"""Address spaces in the IR, and the entries of the target's description with their sizes in bits."""
BYTES = {"f32": 4, "i32": 4, "f16": 2, "bf16": 2, "i16": 2, "i8": 1, "i64": 8, "i1": 1}
PLANNED = re.compile(r"pointer_cast\(([^)]*)\)[^:\n]*: memref<([\dx]*x)?(\w+), [^\n]*?#hivm\.address_space<(\w+)>")
CONSTANT = re.compile(r"(%\w+) = arith\.constant (\d+) : i64")
CORE = re.compile(r"hivm\.module_core_type = #hivm\.module_core_type<(\w+)>")


@dataclass(frozen=True)
class Compiled:
    """What became of a kernel on a target.

    `core`: AIV (vector), AIC (matrix) or MIX. `planned` and `limits`: bytes by address space. `cores`: vector cores
    that the compiler counts on the chip. `retried`: what it gave up to make the plan fit. `overflow`: its words where
    none fits.
    """

    target: str
    core: str = ""
    planned: dict[str, int] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    cores: int = 0
    retried: tuple[str, ...] = ()
    overflow: str = ""


def compile_to_hivm(lowered: Lowered, target: str) -> Compiled:
    """Run the compiler and read its plan. Raises ToolError where it stops for another reason than an overflow."""
    with tempfile.TemporaryDirectory() as folder:
        source, kept = Path(folder) / "kernel.mlir", Path(folder) / "kept"
        source.write_text(lowered.linalg, encoding="utf-8")
        command = [str(BISHENGIR / "bishengir-compile"), str(source), f"--target={target}", *OPTIONS]
        command += [f"--save-temps={kept}", "-o", str(source.with_suffix(".o"))]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        retried = tuple(dict.fromkeys(RETRY.findall(said)))
        if (overflow := OVERFLOW.search(said)) is not None:
            return Compiled(target, retried=retried, overflow=overflow[0])
        if LAST not in said:
            raise ToolError(f"bishengir-compile refuses {lowered.kernel} for {target}: {said[-600:]}")
        return read_plan((kept / "module.hivm.opt.mlir").read_text(encoding="utf-8"), target, retried)


def read_plan(module: str, target: str, retried: tuple[str, ...]) -> Compiled:
    """What the compiled module says of itself. Raises ToolError where its form is another than is read here."""
    offsets = {name: int(value) for name, value in CONSTANT.findall(module)}
    planned: dict[str, int] = {}
    casts = PLANNED.findall(module)
    if len(casts) != module.count("hivm.hir.pointer_cast("):
        raise ToolError("the plan has buffers of a form that is not read here")
    for addresses, shape, kind, space in casts:
        size = prod(int(n) for n in shape.split("x")[:-1]) * BYTES[kind]
        for address in addresses.split(","):
            planned[space] = max(planned.get(space, 0), offsets[address.strip()] + size)
    core = CORE.search(module)
    return Compiled(
        target,
        core=core[1] if core else "",
        planned=planned,
        limits={space: _entry(module, name) // 8 for space, name in SPACES.items()},
        cores=_entry(module, "VECTOR_CORE_COUNT"),
        retried=retried,
    )


def _entry(module: str, name: str) -> int:
    found = re.search(rf'"{name}", (\d+) : i32', module)
    if found is None:
        raise ToolError(f"the target's description has no {name}")
    return int(found[1])
