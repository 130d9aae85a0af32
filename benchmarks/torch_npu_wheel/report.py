"""What was compared and what differs, as Markdown tables."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from benchmarks.torch_npu_wheel.replay import DEVICES
from benchmarks.torch_npu_wheel.verdicts import EXPLAINED

VERDICTS = ("equal", "different", "refused", "unbound", "no meta")
PORT_COLUMNS = ("port", "calls", "operators", "against the declared mode", "on fake `npu` tensors", "by the reference")
NUMBERS = re.compile(r"\d+(, \d+)+")
"""Shapes of two dimensions and more."""
SHOWN = 3
FAULTS = ("different", "refused", "unbound")


def problems(findings: dict[str, Any]) -> list[str]:
    """Every difference that has no verdict, a line each."""
    found = list(findings["failed"])
    found += [line for lines in findings["schemas"].values() for line in lines if _why(line) is None]
    found += [line for line, why in _differences(findings).items() if why is None]
    for name, ours in findings["declared"].items():
        found += [f"port {name}: {what}" for what in _unequal(ours, findings["generated"][name])]
        if (stopped := _stopped(findings["traced"][name])) is not None:
            found.append(f"port {name}: {stopped}")
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
    for text, why in (schemas | calls).items():
        yield f"| {text.replace('|', '/')} | {why or '**unexplained**'} |"


def _ports(findings: dict[str, Any]) -> Iterable[str]:
    yield f"| {' | '.join(PORT_COLUMNS)} |"
    yield f"|{' - |' * len(PORT_COLUMNS)}"
    for name, ours in findings["declared"].items():
        calls, traced = ours["calls"], findings["traced"][name]
        unequal = "; ".join(_unequal(ours, findings["generated"][name])) or "bit for bit equal"
        trace = _stopped(traced) or f"{sum(traced['calls'].values())} calls"
        yield (
            f"| {name} | {sum(calls.values())} | {len(calls)} | {unequal} | {trace} | "
            f"{'; '.join(traced['refused']) or 'nothing'} |"
        )
    for name, reason in findings["refused"].items():
        yield f"| {name} | | | | | not ported: {reason} |"


def _stopped(traced: dict[str, Any]) -> str | None:
    if traced["stopped"] is not None:
        return f"stopped on fake npu tensors: {traced['stopped']}"
    wrong = [logits for logits in traced["logits"] if logits[2] != "npu"]
    return f"logits are on {wrong[0][2]}" if wrong else None


def _unequal(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return [f"{what} differ" for what in ("tokens", "logits", "calls") if ours[what] != theirs[what]]


def _differences(findings: dict[str, Any]) -> dict[str, str | None]:
    """One line for each way in which replayed calls of an operator are not equal, sizes left out of the comparison of
    ways; and why that is right, or None."""
    found: dict[tuple[str, ...], list[tuple[dict[str, Any], str]]] = defaultdict(list)
    for r in findings["replayed"]:
        if r["verdict"] in FAULTS:
            way = NUMBERS.sub("#", r["detail"])
            found[r["call"]["op"], r["verdict"], way].append((r["call"], r["detail"]))
    lines = {}
    for (op, verdict, _), calls in found.items():
        detail, places = calls[0][1], sorted({f"{call['source']} on {call['chip']}" for call, _ in calls})
        detail = f"{verdict}: {detail}"
        shown = ", ".join(places[:SHOWN]) + (f" and {len(places) - SHOWN} more" if len(places) > SHOWN else "")
        lines[f"{op}: {detail} ({len(calls)} calls: {shown})"] = _explained(op, detail)
    return lines


def _explained(op: str, detail: str) -> str | None:
    return next((e.why for e in EXPLAINED if e.fits(op, detail)), None)


def _why(line: str) -> str | None:
    op, _, detail = line.partition(": ")
    return _explained(op, detail)
