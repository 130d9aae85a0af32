"""The checks in turn: numerics of the IR, memory plans, blocks that must not fit, planted faults."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.ascend_triton.frontend import Frontend
from benchmarks.ascend_triton.hivm import TARGETS, compile_to_hivm
from benchmarks.ascend_triton.model_sizes import launches, too_large
from benchmarks.ascend_triton.mutations import MUTATIONS, Key
from benchmarks.ascend_triton.normalised import normalised
from benchmarks.ascend_triton.numerics import OnCpu, first_fault
from benchmarks.ascend_triton.results import Findings, Planned
from benchmarks.ascend_triton.tools import ToolError, versions
from porter.kernels.triton.launch import Launch

Item = TypeVar("Item")
PLAN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def find(work: Path, parts: Collection[str], ops: Collection[Key]) -> Findings:
    """What the `parts` (of run.PARTS) find about `ops`. Builds in `work`, an empty folder."""
    findings = Findings(versions())
    frontend = Frontend()
    if "numerics" in parts:
        kernels = OnCpu(frontend, work / "built")
        for key in ops:
            findings.results += _told("numerics", key, kernels.results(key))
        findings.built = kernels.built
    if "normalised" in parts:
        kernels = OnCpu(frontend, work / "normalised", normalised)
        for key in ops:
            findings.normalised += _told("after HFusion", key, kernels.results(key, (torch.bfloat16,)))
    if "plans" in parts:
        for dtype in PLAN_DTYPES:
            for model, key, launch in launches(dtype):
                if key in ops:
                    findings.planned += _told("plan", key, [_planned(frontend, model, key, launch, dtype)])
            for key, launch in too_large(dtype):
                if key in ops:
                    findings.too_large.append(_planned(frontend, "too large", key, launch, dtype))
    if "mutations" in parts:
        for number, mutation in enumerate(MUTATIONS):
            if mutation.op in ops:
                result = first_fault(mutation, work / f"mutation{number}")
                findings.mutations += _told("planted fault", mutation.op, [(mutation, result)])
    return findings


def _planned(frontend: Frontend, model: str, key: Key, launch: Launch, dtype: torch.dtype) -> Planned:
    name = str(dtype).removeprefix("torch.")
    try:
        lowered = frontend.lower(launch)
        compiled = tuple(compile_to_hivm(lowered, target) for target in TARGETS)
    except ToolError as error:
        return Planned(model, key, launch, name, (), str(error))
    return Planned(model, key, launch, name, compiled)


def _told(what: str, key: Key, found: Iterable[Item]) -> list[Item]:
    print(f"{what}: {'/'.join(key)} ...", file=sys.stderr, flush=True)
    return list(found)
