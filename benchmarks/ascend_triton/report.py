"""What was found, as Markdown tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from benchmarks.ascend_triton.hivm import TARGETS
from benchmarks.ascend_triton.mutations import Key
from benchmarks.ascend_triton.results import Findings, Planned, Result

MEMORIES = {"ub": "UB", "cbuf": "L1", "cc": "L0C"}


def sections(findings: Findings) -> dict[str, str]:
    """The tables of each part of the stage that ran, under the part's name."""
    built = f"{findings.versions}; {findings.built} kernels built, one for each set of types and constants."
    parts = {
        "numerics": [built, "", *_numerics(findings.results)] if findings.results else [],
        "normalised": _numerics(findings.normalised),
        "plans": [*_plans(findings), "", *_too_large(findings)] if findings.planned else [],
        "mutations": _mutations(findings),
    }
    return {part: "\n".join(lines) for part, lines in parts.items() if lines}


def mark(part: str) -> str:
    """What stands before a part's tables in the document."""
    return f"<!-- {part} -->"


def document(text: str, parts: dict[str, str]) -> str:
    """The document with the tables of these parts, each from its mark to the next heading or the end."""
    for part, tables in parts.items():
        before, found, after = text.partition(mark(part))
        if not found:
            raise ValueError(f"the document has no {mark(part)}")
        following = after.find("\n#")
        rest = "" if following < 0 else after[following:]
        text = f"{before}{found}\n\n{tables}\n{rest}"
    return text


def _numerics(found: list[Result]) -> list[str]:
    if not found:
        return []
    lines = ["| Op | dtype | cases | right | not served | largest error / bound |", "| - | - | - | - | - | - |"]
    groups: dict[tuple[Key, str], list[Result]] = {}
    for result in found:
        groups.setdefault((result.op, str(result.dtype).removeprefix("torch.")), []).append(result)
    for (op, dtype), results in groups.items():
        refused = Counter(r.refused for r in results if r.refused)
        ran = [r for r in results if not r.refused]
        worst = max((r.error / r.bound for r in ran), default=0.0)
        reasons = "; ".join(f"{count}: {reason}" for reason, count in refused.items())
        lines.append(
            f"| {'/'.join(op)} | {dtype} | {len(results)} | {sum(r.passed for r in ran)} | {reasons} | {worst:.2f} |"
        )
    return lines


def _plans(findings: Findings) -> list[str]:
    compiled = [c for p in findings.planned for c in p.compiled if c.limits]
    if not compiled:
        return []
    lines = []
    for target in TARGETS:
        one = next((c for c in compiled if c.target == target), None)
        if one is not None:
            limits = ", ".join(f"{MEMORIES[space]} {size:,}" for space, size in one.limits.items())
            lines.append(f"{target}: {one.cores} vector cores; bytes of a core: {limits}.")
    columns = ("Op", "kernel", "sizes", "dtype", "constants", "core", *MEMORIES.values(), "given up to fit", "targets")
    lines += ["", f"| {' | '.join(columns)} |", f"|{' - |' * len(columns)}"]
    return lines + [line for planned in findings.planned for line in _plan_rows(planned)]


def _plan_rows(planned: Planned) -> Iterable[str]:
    """One row for all targets whose plans are equal."""
    head = f"| {'/'.join(planned.op)} | {planned.launch.kernel} | {planned.model} | {planned.dtype} | "
    head += f"{planned.constants} |"
    if planned.stopped:
        yield f"{head} **{planned.stopped}** | | | | | |"
    groups: dict[tuple[str, ...], list[str]] = {}
    for c in planned.compiled:
        sizes = (f"{c.planned[space]:,}" if space in c.planned else "" for space in MEMORIES)
        given_up = ", ".join(option.removeprefix("enable-") for option in c.retried)
        groups.setdefault((c.core or f"**{c.overflow}**", *sizes, given_up), []).append(c.target)
    for cells, targets in groups.items():
        both = "both" if len(targets) == len(TARGETS) else ", ".join(targets)
        yield f"{head} {' | '.join(cells)} | {both} |"


def _too_large(findings: Findings) -> list[str]:
    if not findings.too_large:
        return []
    lines = ["Blocks beyond the chip:", ""]
    lines += ["| kernel | constants | dtype | the compiler says |", "| - | - | - | - |"]
    for planned in findings.too_large:
        said = "; ".join(dict.fromkeys(c.overflow or "**it fits**" for c in planned.compiled)) or planned.stopped
        lines.append(f"| {planned.launch.kernel} | {planned.constants} | {planned.dtype} | {said} |")
    return lines


def _mutations(findings: Findings) -> list[str]:
    if not findings.mutations:
        return []
    caught = sum(result is not None for _, result in findings.mutations)
    lines = [f"{caught} of {len(findings.mutations)} found.", ""]
    lines += ["| source | fault | found by |", "| - | - | - |"]
    for mutation, result in findings.mutations:
        lines.append(f"| {mutation.source} | {mutation.what} | {result or '**nothing**'} |")
    return lines
