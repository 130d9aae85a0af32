"""The command: runs the stage, prints and writes its tables."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.ascend_triton.report import document, mark, sections
from benchmarks.ascend_triton.results import problems
from benchmarks.ascend_triton.stage import find
from porter.kernels.triton.plans import PLANNERS

ROOT = Path(__file__).parents[2]
PARTS = ("numerics", "normalised", "plans", "mutations")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables. Returns 1 where something is not as it must be, else 0."""
    options = _options(arguments)
    torch.set_num_threads(1)
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    ops = [key for key in PLANNERS if "/".join(key) in options.ops]
    findings = find(options.work, options.parts, ops)
    tables = sections(findings)
    print(*(f"{mark(part)}\n\n{text}\n" for part, text in tables.items()), sep="\n")
    # Tables of some Ops would look like those of all.
    if options.report is not None and len(ops) == len(PLANNERS):
        text = options.report.read_text(encoding="utf-8")
        options.report.write_text(document(text, tables), encoding="utf-8")
    found = problems(findings)
    print(*found, f"{len(found)} problems", sep="\n", file=sys.stderr)
    return 1 if found else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = ["/".join(key) for key in PLANNERS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ascend_triton", description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "ascend_triton", help="folder to write to")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="checks to make")
    parser.add_argument("--ops", nargs="+", default=names, choices=names, metavar="OP", help=", ".join(names))
    parser.add_argument("--report", type=Path, help="document to write the tables to, where all Ops are checked")
    return parser.parse_args(arguments)
