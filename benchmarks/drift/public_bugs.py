"""Eighteen bugs that were public issues, each reproduced in miniature: what porter says of them.

`python -m benchmarks.drift.public_bugs`. A miniature keeps the mistake and the kind of module; sizes are the small
models' of DriftBench, so a boundary at 512 tokens lies at 16.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import porter
from benchmarks.drift.case import Case
from benchmarks.drift.judge import candidate_of, over_the_floor
from benchmarks.drift.run import quiet
from benchmarks.drift.workshop import Workshop
from porter.alignment.quorum import align_by_quorum
from porter.errors import PorterError

Answer = tuple[bool, str]


@dataclass(frozen=True)
class PublicBug:
    """One public bug: `case` is its miniature, `ask` judges what porter says of it."""

    number: int
    where: str
    what: str
    case: Case
    ask: Callable[[PublicBug, Workshop], Answer]


def said(report: Any) -> str:
    """A report in one line."""
    first = report.first_drift.module if report.first_drift else "-"
    return f"{report.verdict} at {first}: {', '.join(cause.kind for cause in report.causes) or 'no cause'}"


def aligned(bug: PublicBug, workshop: Workshop) -> tuple[Any, tuple[tuple[str, ...], ...]]:
    """porter's report of the miniature, and where the fault is."""
    prepared = workshop.prepared(bug.case)
    model, expectation = candidate_of(bug.case, workshop)
    if bug.case.fault is not None:
        expectation, _ = over_the_floor(bug.case, workshop, model, expectation)
    return porter.align(prepared.golden, model, source=copy.deepcopy(prepared.source)), expectation.modules


def names_it(bug: PublicBug, workshop: Workshop) -> Answer:
    """Right: a drift, first at the faulty module, the first cause of a right kind."""
    report, modules = aligned(bug, workshop)
    first = report.first_drift.module if report.first_drift else None
    right = report.verdict == "drift" and first in modules[0] and bool(report.causes)
    return right and report.causes[0].kind in bug.case.kinds, said(report)


def exonerates(bug: PublicBug, workshop: Workshop) -> Answer:
    """Right: aligned, because nothing is broken."""
    report, _ = aligned(bug, workshop)
    routing = report.routing
    flips = (
        ""
        if routing is None
        else f"; {routing.flips} of {routing.decisions} routing decisions flip, {routing.benign} benign"
    )
    return report.verdict == "aligned", said(report) + flips


def refuses_other_tokens(bug: PublicBug, workshop: Workshop) -> Answer:
    """Right: not compared, because the two were given other tokens; no module is accused."""
    prepared = workshop.prepared(bug.case)
    tokens = torch.cat([torch.full((len(prepared.tokens), 1), 256), prepared.tokens], dim=1)
    other = porter.capture(workshop.healthy(bug.case), tokens, workshop.folder / "with-bos", new_tokens=4)
    try:
        report = porter.align(prepared.golden, other, source=copy.deepcopy(prepared.source))
    except PorterError as error:
        return "token" in str(error), str(error)
    checks = " ".join(str(check) for check in getattr(report, "sanity", []) or getattr(report, "checks", []))
    return report.verdict == "incomparable" and "token" in checks, f"{said(report)} {checks[:200]}"


def doubts_the_golden(bug: PublicBug, workshop: Workshop) -> Answer:
    """Right: the golden is the odd one out. The faulty model is the golden; candidate and third are right."""
    prepared = workshop.prepared(bug.case)
    wrong, _ = candidate_of(bug.case, workshop)
    folder, healthy = workshop.folder, workshop.healthy(bug.case)
    golden = porter.capture(wrong, prepared.tokens, folder / "wrong-golden", new_tokens=4)
    third = porter.capture(healthy, prepared.tokens, folder / "third-golden", new_tokens=4)

    def compare(kept: Any) -> Any:
        return porter.align(kept, healthy, source=copy.deepcopy(prepared.source))

    report = align_by_quorum([golden, prepared.golden, third], compare, 2.0, copy.deepcopy(prepared.source))
    told = "; ".join(check.says for check in report.sanity)
    blamed = "self_attn" in told and "wrong-golden" in told
    return report.verdict == "aligned" and blamed, f"{said(report)}; {told[:240]}"


def examine(numbers: Sequence[int], seed: int = 0) -> list[dict[str, Any]]:
    """What porter says of each bug."""
    from benchmarks.drift.public_bug_list import BUGS

    quiet()
    rows = []
    with tempfile.TemporaryDirectory(prefix="porter-bugs-") as folder:
        workshop = Workshop(Path(folder), seed)
        for bug in (bug for bug in BUGS if not numbers or bug.number in numbers):
            right, says = bug.ask(bug, workshop)
            rows.append({"number": bug.number, "where": bug.where, "what": bug.what, "right": right, "says": says})
            print(f"{bug.number:2} {'right' if right else 'WRONG'} {bug.where}: {says}", file=sys.stderr, flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a Markdown table; exit status 1 where fewer than 16 of 18 are named rightly."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drift.public_bugs", description=__doc__)
    parser.add_argument("--only", default="", help="numbers, separated by commas")
    parser.add_argument("--json", type=Path, help="write the answers here")
    given = parser.parse_args(arguments)
    rows = examine([int(number) for number in given.only.split(",") if number])
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print("| | bug | mistake | porter says | named |\n|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['number']} | {row['where']} | {row['what']} | {row['says']} | {'yes' if row['right'] else 'no'} |"
        )
    right = sum(row["right"] for row in rows)
    print(f"\n{right} of {len(rows)} named rightly.")
    return 0 if len(rows) - right <= 2 else 1


if __name__ == "__main__":
    sys.exit(main())
