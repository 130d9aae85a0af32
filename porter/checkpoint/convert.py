"""Convert a checkpoint group by group: every source tensor accounted for, memory bounded by the groups in flight."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from porter import __version__
from porter.checkpoint.layout import TensorPlan
from porter.checkpoint.reader import Checkpoint
from porter.checkpoint.sink import TensorSink
from porter.checkpoint.strict_json import listed, shown
from porter.checkpoint.validate import check_finite
from porter.checkpoint.writer import CheckpointWriter
from porter.errors import PorterError

Progress = Callable[[int, int, str], None]
"""Called as (bytes written so far, bytes in all, a tensor just written), from one thread at a time."""


@dataclass(frozen=True)
class Output:
    """Tensors computed together: `compute` maps the source tensors, in the order of `sources`, to one tensor per plan.

    With `pieces` n, `sources` is n runs of equal length: `compute` is called on each run in turn, and its results are
    the next rows (first dimension) of each plan. A stack of 256 experts then takes the memory of one.

    `compute` must depend on its arguments alone: it runs in any thread, in any order, and again after a crash.
    """

    plans: tuple[TensorPlan, ...]
    sources: tuple[str, ...]
    compute: Callable[[list[torch.Tensor]], dict[str, torch.Tensor]]
    pieces: int = 1

    def runs(self) -> list[tuple[str, ...]]:
        """The sources of each piece."""
        width = len(self.sources) // self.pieces
        return [self.sources[i * width : (i + 1) * width] for i in range(self.pieces)]


def convert(
    checkpoint: Checkpoint,
    outputs: Sequence[Output],
    writer: CheckpointWriter,
    *,
    workers: int = 1,
    progress: Progress | None = None,
    allow_nonfinite: bool = False,
    dropped: Iterable[str] = (),
    settings: str = "",
) -> None:
    """Compute `outputs` from `checkpoint` into `writer`; the caller then calls `writer.finish()`.

    Each of `workers` threads holds the sources and results of one piece at a time, and nothing else is kept. The bytes
    written do not depend on `workers`. Outputs that an interrupted run finished are skipped, if its `settings`, what
    values depend on beside source and plan, were the same. When one fails, the rest
    stops, what is written stays to be resumed, and the error names the tensor.

    Before any work, raises PorterError unless every stored tensor is a source of some Output or in `dropped`, every
    source and dropped name is stored, and the Outputs' plans are exactly the writer's. During it, for NaN or infinity
    in a source or result unless `allow_nonfinite`, and for results that differ from their plan.
    """
    check_accounting(checkpoint, outputs, writer, tuple(dropped))
    if workers < 1:
        raise PorterError(f"--workers {workers}: expected at least 1")
    finished = writer.start(source_identity(checkpoint, allow_nonfinite) + (f", {settings}" if settings else ""))
    pending = [output for output in outputs if any(plan.name not in finished for plan in output.plans)]
    run = _Run(checkpoint, writer, finished, progress, allow_nonfinite)
    try:
        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(run.convert_one, output) for output in pending]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                run.stopped.set()
                pool.shutdown(wait=True, cancel_futures=True)
        for future in futures:
            if not future.cancelled():
                future.result()
    except BaseException:
        writer.close()
        raise


def source_identity(checkpoint: Checkpoint, allow_nonfinite: bool) -> str:
    """What a conversion's bytes depend on beside its plan: an unfinished one is continued only where this is equal."""
    return f"{checkpoint.fingerprint}, porter {__version__}, allow_nonfinite {allow_nonfinite}"


def check_accounting(
    checkpoint: Checkpoint, outputs: Sequence[Output], writer: CheckpointWriter, dropped: Sequence[str]
) -> None:
    """PorterError unless sources and `dropped` cover the checkpoint exactly, and plans cover the writer's exactly."""
    at = checkpoint.directory
    for output in outputs:
        if output.pieces < 1 or len(output.sources) % output.pieces:
            raise PorterError(
                f"{writer.target}: tensor {shown(output.plans[0].name)}: {len(output.sources)} sources do not make "
                f"{output.pieces} equal pieces"
            )
    used = {source for output in outputs for source in output.sources}
    unwanted = set(dropped)
    absent = sorted((used | unwanted) - set(checkpoint.names))
    if absent:
        raise PorterError(f"{at}: lacks {len(absent)} tensors that the conversion reads or drops ({listed(absent)})")
    unused = [name for name in checkpoint.names if name not in used and name not in unwanted]
    if unused:
        raise PorterError(
            f"{at}: {len(unused)} tensors are neither converted nor dropped ({listed(unused)}); name them in dropped "
            "if the model does not need them"
        )
    both = sorted(used & unwanted)
    if both:
        raise PorterError(f"{at}: {len(both)} tensors are both converted and dropped ({listed(both)}); choose one")
    counts = Counter(plan.name for output in outputs for plan in output.plans)
    planned = {name: place.plan for name, place in writer.layout.places.items()}
    wrong = sorted(counts.keys() ^ planned.keys()) + [name for name, count in counts.items() if count > 1]
    wrong += [p.name for o in outputs for p in o.plans if p.name in planned and planned[p.name] != p]
    if wrong:
        raise PorterError(
            f"{writer.target}: {len(wrong)} tensors are not planned once and alike by writer and outputs "
            f"({listed(wrong)})"
        )


@dataclass
class _Run:
    """What the workers of one conversion share."""

    checkpoint: Checkpoint
    writer: CheckpointWriter
    finished: frozenset[str]
    progress: Progress | None
    allow_nonfinite: bool

    def __post_init__(self) -> None:
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        places = self.writer.layout.places
        self._total = self.writer.layout.total_bytes
        self._done = sum(places[name].plan.nbytes for name in self.finished)

    def convert_one(self, output: Output) -> None:
        """Read, compute and write one Output, unless another failed; a failure stops the others."""
        if self.stopped.is_set():
            return
        try:
            self._convert(output)
        except BaseException:
            self.stopped.set()
            raise

    def _convert(self, output: Output) -> None:
        wanted = [plan for plan in output.plans if plan.name not in self.finished]
        with ExitStack() as stack:
            sinks = {plan.name: stack.enter_context(self.writer.sink(plan.name)) for plan in wanted}
            for sources in output.runs():
                self._append_piece(output, sources, sinks)
        for plan in wanted:
            self._report(plan)

    def _append_piece(self, output: Output, sources: tuple[str, ...], sinks: dict[str, TensorSink]) -> None:
        results = self._results(output, sources)
        for name, sink in sinks.items():
            tensor = results.pop(name)
            check_finite(name, tensor, allow_nonfinite=self.allow_nonfinite)
            sink.append(tensor)

    def _results(self, output: Output, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """The computed tensors; the sources are free again when this returns, unless the results view them."""
        sources = []
        for name in names:
            tensor = self.checkpoint.load(name)
            check_finite(name, tensor, allow_nonfinite=self.allow_nonfinite)
            sources.append(tensor)
        results = self._computed(output, sources)
        expected = {plan.name for plan in output.plans}
        if results.keys() != expected:
            raise PorterError(
                f"{self.writer.target}: computing {shown(output.plans[0].name)} gave {listed(sorted(results))}, "
                f"planned {listed(sorted(expected))}"
            )
        return results

    @staticmethod
    def _computed(output: Output, sources: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        try:
            with torch.no_grad():
                return dict(output.compute(sources))
        except PorterError as error:
            name = output.plans[0].name
            if str(error).startswith((f"{name}:", f"tensor {name}:")):
                raise
            raise type(error)(f"tensor {shown(name)}: {error}") from error

    def _report(self, plan: TensorPlan) -> None:
        with self._lock:
            self._done += plan.nbytes
            if self.progress is not None:
                self.progress(self._done, self._total, plan.name)
