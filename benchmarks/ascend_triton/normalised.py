"""A kernel's IR after the HFusion passes of Ascend's compiler, just before it becomes instructions of the chip."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.ascend_triton.hivm import OPTIONS, TARGETS
from benchmarks.ascend_triton.tools import BISHENGIR, ToolError

if TYPE_CHECKING:
    # It imports triton, which the text of an IR does not need.
    from benchmarks.ascend_triton.frontend import Lowered

NEXT = "convert-hfusion-to-hivm"
DUMP = ("--mlir-print-ir-module-scope", "--mlir-disable-threading", f"--mlir-print-ir-before={NEXT}")
HEADING = re.compile(r"// -----// IR Dump Before .*?//----- //\n")
END = re.compile(r"\n(?=\[ERROR|\[NOTE|loc\()")
NOT = re.compile(
    r"( *)(%\S+) = hfusion\.elemwise_unary \{fun = #hfusion\.unary_fn<vnot>\} ins\((%\S+) : (tensor<[^>]*xi1>)\).*"
)
TO_UPSTREAM = ("--execution-engine-convert-hfusion-to-upstream", "--execution-engine-convert-hivm-to-upstream")
"""Passes that the IR needs before those of `on_cpu`."""


def normalised(lowered: Lowered) -> Lowered:
    """The kernel after those passes for Ascend910B3. Raises ToolError where the compiler does not come so far."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.mlir"
        source.write_text(lowered.linalg, encoding="utf-8")
        command = [str(BISHENGIR / "bishengir-compile"), str(source), f"--target={TARGETS[0]}", *OPTIONS, *DUMP]
        command += ["-o", str(source.with_suffix(".o"))]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    dumps = HEADING.split(said)
    if len(dumps) < 2:
        raise ToolError(f"bishengir-compile does not reach {NEXT} with {lowered.kernel}: {said[-600:]}")
    module = END.split(dumps[1])[0]
    if "get_block_idx" in module:
        raise ToolError(f"{lowered.kernel} asks for its block by another way than its arguments")
    # One address more, of what cores synchronise by.
    return replace(lowered, linalg=with_negations(module), leading=1, passes=TO_UPSTREAM)


def with_negations(module: str) -> str:
    """Negations of booleans spelled out: what ascendnpu-ir 1.2.0 makes of them for a CPU leaves them out."""

    def spelled(found: re.Match[str]) -> str:
        indent, result, operand, kind = found.groups()
        one = f"%one_{result.removeprefix('%')}"
        constant = f"{indent}{one} = arith.constant dense<true> : {kind}"
        return f"{constant}\n{indent}{result} = arith.xori {operand}, {one} : {kind}"

    return NOT.sub(spelled, module)
