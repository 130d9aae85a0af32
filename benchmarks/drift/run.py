"""`python -m benchmarks.drift`: score porter (and msprobe, where it is) on every case."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.drift import faults_state, legitimate
from benchmarks.drift.case import Case, fault_cases
from benchmarks.drift.families import FAMILIES, checkpoint
from benchmarks.drift.judge import Outcome, judge
from benchmarks.drift.score import line, markdown, summary
from benchmarks.drift.workshop import Workshop


def all_cases(seed: int) -> list[Case]:
    """Every planted fault and every legitimate difference."""
    return [*fault_cases(faults_state.FAULTS, seed), *legitimate.cases(seed)]


def selected(cases: Sequence[Case], models: Sequence[str], only: Sequence[str]) -> list[Case]:
    """The cases of `models` (all where empty) whose id is in `only`, or starts with one that ends in `*`."""

    def wanted(id: str) -> bool:
        return not only or any(id.startswith(o[:-1]) if o.endswith("*") else o in (id, id.split("/")[0]) for o in only)

    return [case for case in cases if (not models or case.family.name in models) and wanted(case.id)]


def quiet() -> None:
    """One thread, and no progress bars or deprecations of transformers on stderr."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def run_family(work: tuple[list[str], int]) -> list[Outcome]:
    """The outcomes of the cases of these ids, in this process; lines go to stderr as they come."""
    ids, seed = work
    cases = [case for case in all_cases(seed) if case.id in ids]
    quiet()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="porter-drift-") as folder:
        workshop = Workshop(Path(folder), seed)
        for case in cases:
            outcomes.append(judge(case, workshop))
            print(line(outcomes[-1]), file=sys.stderr, flush=True)
    return outcomes


def run(cases: Sequence[Case], seed: int, jobs: int) -> Iterator[Outcome]:
    """The outcomes, family by family, in `jobs` processes."""
    groups = [[case.id for case in cases if case.family is family] for family in FAMILIES.values()]
    work = sorted(((group, seed) for group in groups if group), key=lambda item: -len(item[0]))
    if jobs == 1 or len(work) == 1:
        for each in work:
            yield from run_family(each)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for found in pool.imap_unordered(run_family, work):
            yield from found


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a Markdown table; exit status 1 where porter misjudged a case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drift", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="draws prompts, layers, dtypes and sizes of the faults")
    parser.add_argument("--models", default="", help="families, separated by commas")
    parser.add_argument("--only", default="", help="case ids (ID, ID/FAMILY, or PREFIX*), separated by commas")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="every N-th case from the I-th on")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path, help="write every outcome here")
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument("--msprobe", type=Path, metavar="PYTHON", help="an interpreter that has mindstudio-probe")
    given = parser.parse_args(arguments)
    shard, shards = map(int, given.shard.split("/"))
    chosen = selected(all_cases(given.seed), _split(given.models), _split(given.only))[shard::shards]
    if given.list:
        print("\n".join(f"{case.id}  {case.pair}  {', '.join(case.kinds) or 'legitimate'}" for case in chosen))
        return 0
    for family in {case.family.name for case in chosen}:
        checkpoint(FAMILIES[family])
    outcomes = list(run(chosen, given.seed, given.jobs))
    theirs = None
    if given.msprobe is not None:
        from benchmarks.drift.msprobe_side import run_msprobe

        theirs = run_msprobe(given.msprobe, given.seed, [case.id for case in chosen])
    found = summary(outcomes, theirs)
    if given.json is not None:
        given.json.write_text(json.dumps(found | {"seed": given.seed}, indent=1), encoding="utf-8")
    print(markdown(found))
    return 1 if found["misjudged"] else 0


def _split(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]
