"""The report's rows of one replayed module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from porter.alignment.budget import Verdict
from porter.alignment.module_result import ModuleResult
from porter.alignment.observation import cosine
from porter.alignment.report import FirstDrift, ModuleRow
from porter.alignment.routing import COMBINE, Flips
from porter.alignment.states import growth
from porter.alignment.verdict import Drifted
from porter.kernels.dispatch import op_calls

MATHEMATICS = "differs in float64: mathematics or weights, not rounding"
OUTLIER = "errs unlike the same module of other layers"
KERNEL = "agrees in float64 but not in its own precision: kernel or dtype"


@dataclass(frozen=True)
class CallFinding:
    """What one recorded call of a module showed, decided between the lanes."""

    step: int
    shown: Verdict | None
    drifted: bool
    why: str
    flips: Flips | None
    cosine: float | None


def findings(result: ModuleResult) -> list[CallFinding]:
    """One finding per recorded call, in order."""
    return [_finding(result, index) for index in range(len(result.calls))]


def _finding(result: ModuleResult, index: int) -> CallFinding:
    exact = _at(result.exact, index)
    native = _at(result.native, index)
    flips = result.flips[index] if index < len(result.flips) else None
    excess = flips is not None and flips.excess > 0
    over_exact, over_native = exact is not None and exact.over, native is not None and native.over
    from_exact = over_exact and not over_native
    shown = exact if from_exact else (native or exact)
    cosine = _cosine(result, index, shown, from_exact or native is None)
    why = result.why
    if over_exact:
        why = f"{MATHEMATICS} ({exact.label}: {exact.error:.2g})" if exact is not None else why
    elif over_native and result.outlier and native is not None:
        why = f"{OUTLIER} ({native.label}): {result.outlier}"
    elif over_native:
        why = f"{KERNEL} ({native.label})" if native is not None and result.exact else (why or KERNEL)
    elif excess and flips is not None:
        count = flips.flipped.numel()
        why = f"{flips.excess} of {count} tokens go to other experts although the scores are not near"
        shown = Verdict(COMBINE, flips.excess / count, 0.0)
        cosine = _cosine(result, index, shown, False)
    if index == len(result.calls) - 1:
        why = "; ".join(part for part in (why, growth(result.tensors)) if part)
    return CallFinding(result.calls[index].step, shown, over_exact or over_native or excess, why, flips, cosine)


def _at(verdicts: Sequence[Verdict | None], index: int) -> Verdict | None:
    return verdicts[index] if index < len(verdicts) else None


def _cosine(result: ModuleResult, index: int, shown: Verdict | None, exact: bool) -> float | None:
    """Of the tensor whose error the row shows, against the oracle, in the lane that shows it."""
    lane = result.candidate_exact if exact else result.candidate_native
    if shown is None or index >= len(result.oracle) or index >= len(lane):
        return None
    mine, theirs = lane[index].tensors, result.oracle[index].tensors
    return cosine(mine[shown.label], theirs[shown.label]) if shown.label in mine and shown.label in theirs else None


def rows_of(result: ModuleResult, module: nn.Module | None) -> Iterator[ModuleRow]:
    """A row per step; where a module was called several times in a step, its worst call."""
    op, provider = (None, None) if module is None else provider_of(module)
    by_step: dict[int, list[CallFinding]] = {}
    for finding in findings(result):
        by_step.setdefault(finding.step, []).append(finding)
    for step, found in by_step.items():
        worst = max(found, key=lambda f: (f.drifted, f.shown.ratio if f.shown else -1.0))
        benign = any(f.flips is not None and bool(f.flips.benign.any()) for f in found)
        status = "drift" if worst.drifted else "skipped" if worst.shown is None else "flipped" if benign else "ok"
        yield ModuleRow(
            module=result.pair.module,
            source=result.pair.source,
            step=step,
            op=op,
            provider=provider,
            introduced=worst.shown.error if worst.shown else None,
            budget=worst.shown.budget if worst.shown else None,
            cosine=worst.cosine,
            status=status,
            why=worst.why or ("no tensor in common with the golden" if worst.shown is None else ""),
        )


def provider_of(module: nn.Module) -> tuple[str | None, str | None]:
    """(op, provider) that served a module's own Ops most; (None, None) for a module without Ops."""
    own = [call for site, call in op_calls(module) if "." not in site and call.calls]
    if not own:
        return None, None
    busiest = max(own, key=lambda call: sum(call.calls.values()))
    return f"{busiest.name}/{busiest.variant}", max(busiest.calls, key=busiest.calls.__getitem__)


def drifts_of(result: ModuleResult) -> list[Drifted]:
    """The calls over their budget, with the tensor that shows it most."""
    return [
        Drifted(
            (f.step, result.pair.position),
            FirstDrift(result.pair.module, result.pair.source, f.step, f.shown.label if f.shown else "output"),
        )
        for f in findings(result)
        if f.drifted
    ]
