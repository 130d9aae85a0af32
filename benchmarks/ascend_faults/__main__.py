"""Plant every fault, print what is said of it, and write the table: `python -m benchmarks.ascend_faults`."""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path

import torch

from benchmarks.ascend_faults.judge import Outcome, judge
from benchmarks.ascend_faults.table import FAULTS, page
from benchmarks.ascend_faults.workshop import Workshop

PAGE = Path(__file__).parents[2] / "docs" / "ascend_faults.md"


def main() -> int:
    """0 where every fault is met as expected, else 1. `--only` plants some, and writes no page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="comma-separated ids, or starts of ids")
    parser.add_argument("--places", default="", help="comma-separated starts of exports")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    only, places = (tuple(filter(None, text.split(","))) for text in (options.only, options.places))
    chosen = [f for f in FAULTS if (not only or f.id.startswith(only)) and f.place.name.startswith(places or "")]
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(Path(folder))
        for fault in chosen:
            outcome = judge(fault, workshop)
            outcomes.append(outcome)
            print(f"{'ok  ' if outcome.met else 'MISS'} {fault.id}: {outcome.line()}", flush=True)
    if len(chosen) == len(FAULTS):
        PAGE.write_text(page(outcomes))
        print(f"written: {PAGE}")
    missed = sum(not outcome.met for outcome in outcomes)
    print(f"{len(outcomes)} faults, {missed} not met as expected")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
