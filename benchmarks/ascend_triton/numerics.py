"""The kernels' IR, run on x86, over their Ops' own cases against the float64 oracle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.ascend_triton.frontend import Frontend, Lowered
from benchmarks.ascend_triton.guarded import GuardedPlan, WroteOutside
from benchmarks.ascend_triton.on_cpu import CpuKernel
from benchmarks.ascend_triton.tools import ToolError
from porter.kernels.contract import Case, Evidence, Implementation
from porter.kernels.registry import default_registry
from porter.kernels.triton.launch import NotServed
from porter.kernels.triton.plans import plan
from porter.kernels.verification import verify

PROGRAMS = 3
"""Programs that share the rows: few, so that each works on several and none has as many as another."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Key = tuple[str, str]


@dataclass(frozen=True)
class Result:
    """One case: `error` and `bound` as the Op measures them, or what stopped it."""

    op: Key
    dtype: torch.dtype
    label: str
    error: float
    bound: float
    stopped: str = ""
    refused: str = ""

    @property
    def passed(self) -> bool:
        """Whether it ran and is right, or is not served by any kernel."""
        return not self.stopped and (bool(self.refused) or self.error <= self.bound)

    def __str__(self) -> str:
        what = self.stopped or f"error {self.error:.2g}, bound {self.bound:.2g}"
        return f"{'/'.join(self.op)} {str(self.dtype).removeprefix('torch.')} {self.label}: {what}"


class OnCpu:
    """The Triton kernels as implementations of the Ops on this machine, through Ascend's frontend."""

    def __init__(self, frontend: Frontend, work: Path) -> None:
        self._frontend, self._work = frontend, work
        self._built: dict[int, tuple[Lowered, CpuKernel]] = {}

    @property
    def built(self) -> int:
        """Kernels compiled so far."""
        return len(self._built)

    def results(self, key: Key, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Iterator[Result]:
        """Each case of an Op."""
        op = default_registry().op(*key)
        for dtype in dtypes:
            for case in op.inputs(dtype):
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
            self._built[id(lowered)] = lowered, CpuKernel(lowered, self._work)
        return self._built[id(lowered)][1]
