"""The kernels' IR, run on x86, over their Ops' own cases against the float64 oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.ascend_triton.frontend import Frontend, Lowered
from benchmarks.ascend_triton.guarded import GuardedPlan, WroteOutside
from benchmarks.ascend_triton.mutations import Key, Mutation
from benchmarks.ascend_triton.on_cpu import CpuKernel
from benchmarks.ascend_triton.results import Result
from benchmarks.ascend_triton.tools import ToolError
from benchmarks.ascend_triton.wider_cases import WIDER
from porter.kernels.contract import Case, Evidence, Implementation
from porter.kernels.registry import default_registry
from porter.kernels.triton.launch import NotServed
from porter.kernels.triton.plans import plan
from porter.kernels.verification import verify

PROGRAMS = 3
"""Programs that share the rows: few, so that each works on several and none has as many as another."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class OnCpu:
    """The Triton kernels as implementations of the Ops on this machine, through Ascend's frontend."""

    def __init__(self, frontend: Frontend, work: Path, after: Callable[[Lowered], Lowered] | None = None) -> None:
        """`after`: passes of Ascend's compiler that the kernels go through before they are built."""
        self._frontend, self._work, self._after = frontend, work, after
        self._built: dict[int, tuple[Lowered, CpuKernel]] = {}

    @property
    def built(self) -> int:
        """Kernels compiled so far."""
        return len(self._built)

    def results(self, key: Key, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Iterator[Result]:
        """Each case of an Op, and the wider ones."""
        op = default_registry().op(*key)
        for dtype in dtypes:
            for case in (*op.inputs(dtype), *WIDER[key](dtype)):
                yield self._result(key, dtype, case)

    def _result(self, key: Key, dtype: torch.dtype, case: Case) -> Result:
        op = default_registry().op(*key)
        try:
            (check,) = verify(replace(op, inputs=lambda _: [case]), self._implementation(key), [dtype])
        except (ToolError, WroteOutside) as error:
            bound = op.tolerance.relative(dtype, *case.arguments)
            return Result(key, dtype, case.label, math.nan, bound, stopped=str(error))
        return Result(key, dtype, case.label, check.error, check.bound, refused=check.refused)

    def _implementation(self, key: Key) -> Implementation:
        def accepts(*arguments: Any) -> str | None:
            try:
                plan(*key, arguments, PROGRAMS)
            except NotServed as refusal:
                return str(refusal)
            return None

        def call(*arguments: Any) -> Any:
            guarded = GuardedPlan(plan(*key, arguments, PROGRAMS))
            for launch in guarded.launches:
                self._kernel(self._frontend.lower(launch))(launch.grid, launch.arguments)
            outputs = guarded.outputs()
            return outputs if len(outputs) > 1 else outputs[0]

        return Implementation(call, accepts, Evidence("interpreted"))

    def _kernel(self, lowered: Lowered) -> CpuKernel:
        if id(lowered) not in self._built:
            self._built[id(lowered)] = lowered, CpuKernel(self._after(lowered) if self._after else lowered, self._work)
        return self._built[id(lowered)][1]


def first_fault(mutation: Mutation, folder: Path) -> Result | None:
    """The first case that finds the fault, None where every case passes. Works in `folder`, an empty one."""
    folder.mkdir(parents=True)
    (folder / f"{mutation.source}.py").write_text(mutation.text(), encoding="utf-8")
    kernels = OnCpu(Frontend(folder), folder / "built")
    return next((r for r in kernels.results(mutation.op, (mutation.dtype,)) if not r.passed), None)
