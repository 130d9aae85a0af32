"""Check a chip's kernels against the reference on this very machine, before a port relies on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import torch

from porter.chips.catalogue import Chip
from porter.errors import Refusal
from porter.kernels.registry import OpRegistry
from porter.kernels.verification import verify

CASES = 12
"""Generated cases per Op: odd shapes and extreme rows come first in every generator; the tests run all of them."""


@dataclass(frozen=True)
class KernelCheck:
    """The worst case of one kernel: its error, and the tolerance that it had to meet."""

    op: str
    variant: str
    provider: str
    cases: int
    error: float
    tolerance: float


def check_kernels(
    registry: OpRegistry, chip: Chip, ops: Iterable[tuple[str, str]], dtype: torch.dtype
) -> tuple[KernelCheck, ...]:
    """Run the first provider's kernel of each Op over the Op's own cases against the float64 oracle.

    Cases that the kernel does not accept are the reference's, and are not counted. Raises Refusal naming the Op, the
    case and both numbers when a kernel misses its tolerance.
    """
    results = []
    for name, variant in ops:
        op = registry.op(name, variant)
        found = registry.resolve(name, variant, chip.name, chip.providers).implementations
        if not found:
            continue
        provider, kernel = found[0]
        ran = [check for check in islice(verify(op, kernel, [dtype]), CASES) if not check.refused]
        for check in ran:
            if not check.passed:
                raise Refusal(
                    f"{name}/{variant}: provider {provider} is off by {check.error:.2e} on case {check.label} "
                    f"({str(dtype).removeprefix('torch.')}), tolerance {check.bound:.2e}; adapt with "
                    f"--reference-only {name} to do without it"
                )
        if ran:
            worst = max(ran, key=lambda check: check.error / check.bound)
            results.append(KernelCheck(name, variant, provider, len(ran), worst.error, worst.bound))
    return tuple(results)
