"""One case: build, plant, align, and note what porter said beside what is true."""

from __future__ import annotations

import copy
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

import porter
from benchmarks.drift.case import Case, Expectation, plant
from benchmarks.drift.floor import excess
from benchmarks.drift.site import Site
from benchmarks.drift.workshop import Workshop

CRASHED = "crashed"
"""The verdict of a case that raised, ran out of time, or took its process with it."""


@dataclass(frozen=True)
class Outcome:
    """What is true of a case (`modules`, `kinds`, `excess`) and what porter said of it."""

    id: str
    family: str
    pair: str
    fault: bool
    modules: tuple[tuple[str, ...], ...]
    kinds: tuple[str, ...]
    excess: float | None
    verdict: str
    first: str | None
    causes: tuple[str, ...]
    seconds: float
    error: str = ""

    @property
    def counts(self) -> bool:
        """Whether the fault moves its module by more than twice the noise; a case that crashed counts as a failure."""
        return self.fault and (self.verdict == CRASHED or (self.excess is not None and self.excess > 2.0))

    @property
    def detected(self) -> bool:
        """Whether the verdict is drift."""
        return self.verdict == "drift"

    @property
    def located(self) -> bool:
        """Whether the first drift is at the (first) planted fault."""
        return self.detected and self.first in self.modules[0]

    @property
    def explained(self) -> bool:
        """Whether the first cause named is right."""
        return self.detected and bool(self.causes) and self.causes[0] in self.kinds

    @property
    def false_alarm(self) -> bool:
        """Whether a legitimate difference was not called aligned."""
        return not self.fault and self.verdict != "aligned"

    def data(self) -> dict[str, Any]:
        """As JSON."""
        marks = ("counts", "detected", "located", "explained") if self.fault else ("false_alarm",)
        return asdict(self) | {name: getattr(self, name) for name in marks}


def candidate_of(case: Case, workshop: Workshop) -> tuple[Any, Expectation]:
    """The case's candidate, fault planted, and where the fault is."""
    import random

    model = workshop.candidate(case)
    with torch.no_grad():
        if case.fault is not None:
            return model, plant(case.fault, model, case, workshop.stored(case))
        if case.plant is not None:
            case.plant(Site(model, case.family, 0, random.Random(case.seed), workshop.stored(case)))
    return model, Expectation()


def over_the_floor(case: Case, workshop: Workshop, model: Any, expectation: Expectation) -> tuple[Expectation, float]:
    """The first planted fault that moves its module by more than twice the noise, and those after it, and by how much.

    Where none does, all of them and the largest excess: a fault in every layer may be visible in some alone.
    """
    prepared = workshop.prepared(case)
    generated = torch.tensor(prepared.golden.generated).view(-1, len(prepared.tokens)).t()
    largest = 0.0
    for index, names in enumerate(expectation.modules):
        found = excess(workshop.healthy(case), model, names[0], prepared.tokens, prepared.mask, generated)
        if found > 2.0:
            return Expectation(expectation.modules[index:]), found
        largest = max(largest, found)
    return expectation, largest


def judge(case: Case, workshop: Workshop, limit: float) -> Outcome:
    """Run the case, for `limit` seconds at most. An exception is an outcome too: the verdict "crashed"."""
    try:
        with limited(limit):
            return _judged(case, workshop)
    except Exception as failure:
        return crashed(case, f"{type(failure).__name__}: {failure}")


def crashed(case: Case, error: str) -> Outcome:
    """The outcome of a case that came to no end."""
    faulty = case.fault is not None
    return Outcome(case.id, case.family.name, case.pair, faulty, (), case.kinds, None, CRASHED, None, (), 0.0, error)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the main thread after so many seconds."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _judged(case: Case, workshop: Workshop) -> Outcome:
    prepared = workshop.prepared(case)
    model, expectation = candidate_of(case, workshop)
    moved = None
    if case.fault is not None:
        expectation, moved = over_the_floor(case, workshop, model, expectation)
    given = recorded(case, workshop, model) if case.recorded else model
    began = time.process_time()
    try:
        report = porter.align(prepared.golden, given, source=copy.deepcopy(prepared.source))
        verdict, first = report.verdict, report.first_drift.module if report.first_drift else None
        causes, error = tuple(cause.kind for cause in report.causes), ""
    except Exception as failure:
        verdict, first, causes, error = CRASHED, None, (), f"{type(failure).__name__}: {failure}"
    seconds = time.process_time() - began
    return Outcome(
        case.id, case.family.name, case.pair, case.fault is not None, expectation.modules, case.kinds, moved, verdict,
        first, causes, seconds, error,
    )  # fmt: skip


def recorded(case: Case, workshop: Workshop, model: Any) -> Any:
    """A recording of the candidate in place of the candidate: one row at a time, or on other threads."""
    before = torch.get_num_threads()
    try:
        if case.recorded == "threads":
            torch.set_num_threads(before % 2 + 1)
        return workshop.capture(case, model, case.recorded, batch_size=1 if case.recorded == "batch" else None)
    finally:
        torch.set_num_threads(before)
