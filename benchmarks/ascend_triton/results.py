"""What each check of the stage gives, and which of it is not as it must be."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from benchmarks.ascend_triton.hivm import Compiled
from benchmarks.ascend_triton.mutations import Key, Mutation
from porter.kernels.triton.launch import Launch


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


@dataclass(frozen=True)
class Planned:
    """A launch of a model's size, compiled for each target. `stopped`: why a target has none."""

    model: str
    op: Key
    launch: Launch
    dtype: str
    compiled: tuple[Compiled, ...]
    stopped: str = ""

    @property
    def constants(self) -> str:
        """The compile-time constants in words."""
        return " ".join(f"{name}={value}" for name, value in self.launch.constants.items())

    @property
    def problem(self) -> str:
        """Why this is not as it must be: stopped, overflowing, or other on one target; empty otherwise."""
        overflow = next((c.overflow for c in self.compiled if c.overflow), "")
        return self.stopped or overflow

    def __str__(self) -> str:
        return f"{self.launch.kernel} {self.constants} {self.dtype} ({self.model})"


@dataclass
class Findings:
    """All that the stage found. `normalised`: results after HFusion; `too_large`: launches that must overflow."""

    versions: str = ""
    built: int = 0
    results: list[Result] = field(default_factory=list)
    normalised: list[Result] = field(default_factory=list)
    planned: list[Planned] = field(default_factory=list)
    too_large: list[Planned] = field(default_factory=list)
    mutations: list[tuple[Mutation, Result | None]] = field(default_factory=list)


def problems(findings: Findings) -> list[str]:
    """Everything that is not as it must be, a line each."""
    found = [str(result) for result in findings.results if not result.passed]
    found += [f"after HFusion: {result}" for result in findings.normalised if not result.passed]
    found += [f"{p}: {p.problem}" for p in findings.planned if p.problem]
    found += [f"{p}: fits, or stopped otherwise: {p.stopped}" for p in findings.too_large if not _overflowed(p)]
    return found + [f"not found: {m.what} ({m.source})" for m, result in findings.mutations if result is None]


def _overflowed(planned: Planned) -> bool:
    return bool(planned.compiled) and all(c.overflow for c in planned.compiled)
