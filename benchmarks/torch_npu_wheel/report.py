"""What was compared and what differs, as Markdown tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from benchmarks.torch_npu_wheel.replay import DEVICES
from benchmarks.torch_npu_wheel.verdicts import EXPLAINED

VERDICTS = ("equal", "different", "refused", "unbound", "no meta")
FAULTS = ("different", "refused", "unbound")


def problems(findings: dict[str, Any]) -> list[str]:
    """Every difference that has no verdict, a line each."""
    found = [line for lines in findings["schemas"].values() for line in lines if _why(line) is None]
    for line, why in _differences(findings).items():
        if why is None:
            found.append(" ".join(line))
    for name, ours in findings["declared"].items():
        found += [f"port {name}: {what}" for what in _unequal(ours, findings["generated"][name])]
    return found


def markdown(findings: dict[str, Any]) -> str:
    """The tables: operators, differences, ports."""
    return "\n".join([*_operators(findings), "", *_found(findings), "", *_ports(findings)])


def _operators(findings: dict[str, Any]) -> Iterable[str]:
    counted = Counter((r["call"]["op"], r["verdict"]) for r in findings["replayed"])
    schemas, replayed = findings["schemas"], findings["replayed"]
    equal = sum(not lines for lines in schemas.values())
    without = sorted({r["call"]["op"] for r in replayed if r["verdict"] == "no meta"})
    idle = sorted(set(schemas) - {r["call"]["op"] for r in replayed})
    yield f"torch_npu {findings['version']}: {equal} of {len(schemas)} schemas equal."
    yield f"{len(replayed) // len(DEVICES)} distinct calls, each on fake `npu` and on `meta` tensors."
    yield f"Without a meta kernel in the wheel (binding alone is checked): {', '.join(without) or 'none'}."
    yield f"In the catalogue and called by no case: {', '.join(idle) or 'none'}."
    yield ""
    yield f"| operator | schema | {' | '.join(VERDICTS)} |"
    yield f"|{' - |' * (len(VERDICTS) + 2)}"
    for name, lines in schemas.items():
        numbers = (str(counted[name, verdict] or "") for verdict in VERDICTS)
        yield f"| {name} | {'equal' if not lines else f'{len(lines)} differences'} | {' | '.join(numbers)} |"


def _found(findings: dict[str, Any]) -> Iterable[str]:
    schemas = {line: _why(line) for lines in findings["schemas"].values() for line in lines}
    calls = _differences(findings)
    if not schemas and not calls:
        yield "No differences."
        return
    yield "| difference | verdict |"
    yield "| - | - |"
    for text, why in [*schemas.items(), *((" ".join(parts), why) for parts, why in calls.items())]:
        yield f"| {text.replace('|', '/')} | {why or '**unexplained**'} |"


def _ports(findings: dict[str, Any]) -> Iterable[str]:
    yield "| port | calls of torch_npu | operators | tokens and logits, declared mode against wheel |"
    yield "| - | - | - | - |"
    for name, ours in findings["declared"].items():
        unequal = _unequal(ours, findings["generated"][name])
        calls = ours["calls"]
        yield f"| {name} | {sum(calls.values())} | {len(calls)} | {'; '.join(unequal) or 'bit for bit equal'} |"
    for name, reason in findings["refused"].items():
        yield f"| {name} | | | not ported: {reason} |"


def _unequal(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return [f"{what} differ" for what in ("tokens", "logits", "calls") if ours[what] != theirs[what]]


def _differences(findings: dict[str, Any]) -> dict[tuple[str, str, str, str], str | None]:
    """(operator, chips, source, verdict and detail) of the replayed calls that are not equal, and why that is right."""
    found: dict[tuple[str, str, str, str], str | None] = {}
    for r in findings["replayed"]:
        if r["verdict"] in FAULTS:
            call = r["call"]
            detail = f"{r['verdict']} on {r['device']}: {r['detail']}"
            found[call["op"], call["chip"], call["source"], detail] = _explained(call["op"], detail)
    return found


def _explained(op: str, detail: str) -> str | None:
    return next((e.why for e in EXPLAINED if e.fits(op, detail)), None)


def _why(line: str) -> str | None:
    op, _, detail = line.partition(": ")
    return _explained(op, detail)
