"""`python -m benchmarks.drift`: score porter (and msprobe, where it is) on every case."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from benchmarks.drift import faults_state, legitimate
from benchmarks.drift.case import Case, fault_cases
from benchmarks.drift.families import FAMILIES, checkpoint
from benchmarks.drift.judge import Outcome, crashed, judge
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


class Worker:
    """Judges cases one by one in this process; what one family's cases share is kept until the next family."""

    def __init__(self, seed: int, limit: float) -> None:
        quiet()
        self.seed, self.limit = seed, limit
        self._cases = {case.id: case for case in all_cases(seed)}
        self._folder = tempfile.TemporaryDirectory(prefix="porter-drift-")
        self._workshop: tuple[str, Workshop] | None = None

    def judged(self, id: str) -> Outcome:
        """The outcome of the case of that id; its line goes to stderr."""
        case = self._cases[id]
        outcome = judge(case, self._workshop_of(case.family.name), self.limit)
        print(line(outcome), file=sys.stderr, flush=True)
        return outcome

    def _workshop_of(self, family: str) -> Workshop:
        if self._workshop is None or self._workshop[0] != family:
            folder = Path(self._folder.name) / family
            folder.mkdir(exist_ok=True)
            self._workshop = (family, Workshop(folder, self.seed))
        return self._workshop[1]


@functools.cache
def _worker(seed: int, limit: float) -> Worker:
    """This process's own."""
    return Worker(seed, limit)


def _judged_here(work: tuple[list[str], int, float]) -> list[Outcome]:
    ids, seed, limit = work
    return [_worker(seed, limit).judged(id) for id in ids]


TOGETHER = 12
"""Cases of a family that a process is given at a time: they share goldens and healthy candidates."""


def run(cases: Sequence[Case], seed: int, jobs: int, limit: float) -> Iterator[Outcome]:
    """The outcomes as they come, in `jobs` processes. A case whose process dies is an outcome: crashed."""
    ids = [case.id for family in FAMILIES.values() for case in cases if case.family is family]
    if jobs == 1:
        worker = Worker(seed, limit)
        yield from map(worker.judged, ids)
        return
    family = {case.id: case.family.name for case in cases}
    groups = [list(group) for _, group in itertools.groupby(ids, family.__getitem__)]
    left = [group[i : i + TOGETHER] for group in groups for i in range(0, len(group), TOGETHER)]
    while left:
        died = []
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            for future in as_completed(waiting := {pool.submit(_judged_here, (g, seed, limit)): g for g in left}):
                try:
                    yield from future.result()
                except BrokenProcessPool:
                    died.append(waiting[future])
        if jobs == 1 and died:
            # One case at a time in one process: the first that has no outcome is the one that ended it.
            yield crashed(next(case for case in cases if case.id == died[0][0]), "its process died")
            died = died[1:]
        jobs, left = 1, [[id] for group in died for id in group]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a Markdown table; exit status 1 where porter misjudged a case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drift", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="draws prompts, layers, dtypes and sizes of the faults")
    parser.add_argument("--models", default="", help="families, separated by commas")
    parser.add_argument("--only", default="", help="case ids (ID, ID/FAMILY, or PREFIX*), separated by commas")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="every N-th case from the I-th on")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--limit", type=float, default=120.0, metavar="S", help="seconds after which a case has failed")
    parser.add_argument("--json", type=Path, help="write every outcome here, anew after each")
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument("--msprobe", type=Path, metavar="PYTHON", help="an interpreter that has mindstudio-probe")
    parser.add_argument(
        "--msprobe-cases", type=int, metavar="N", help="so many of the faults for it, and half as many legitimate ones"
    )
    given = parser.parse_args(arguments)
    shard, shards = map(int, given.shard.split("/"))
    chosen = selected(all_cases(given.seed), _split(given.models), _split(given.only))[shard::shards]
    if given.list:
        print("\n".join(f"{case.id}  {case.pair}  {', '.join(case.kinds) or 'legitimate'}" for case in chosen))
        return 0
    for family in {case.family.name for case in chosen}:
        checkpoint(FAMILIES[family])
    outcomes: list[Outcome] = []
    for outcome in run(chosen, given.seed, given.jobs, given.limit):
        outcomes.append(outcome)
        _write(given.json, summary(outcomes), given.seed)
    theirs = None
    if given.msprobe is not None:
        from benchmarks.drift.msprobe_side import run_msprobe

        ids = [case.id for case in sampled(chosen, given.msprobe_cases)]
        theirs = run_msprobe(given.msprobe, given.seed, ids, given.limit)
    found = summary(outcomes, theirs)
    _write(given.json, found, given.seed)
    print(markdown(found))
    return 1 if found["misjudged"] else 0


def sampled(cases: Sequence[Case], faults: int | None) -> list[Case]:
    """Evenly spaced: `faults` cases with a fault and half as many without; all where None."""
    if faults is None:
        return list(cases)
    found = []
    for some, count in (([c for c in cases if c.fault], faults), ([c for c in cases if not c.fault], faults // 2)):
        step = max(1.0, len(some) / max(1, count))
        found += [some[int(index * step)] for index in range(min(count, len(some)))]
    return found


def _write(path: Path | None, found: dict[str, Any], seed: int) -> None:
    if path is not None:
        path.write_text(json.dumps(found | {"seed": seed}, indent=1), encoding="utf-8")


def _split(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]
