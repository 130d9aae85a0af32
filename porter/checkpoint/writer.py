"""Write a safetensors checkpoint tensor by tensor, in any order, whole or not at all, and resumably."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from porter.checkpoint.journal import Journal
from porter.checkpoint.layout import Place, TensorPlan, plan_layout
from porter.checkpoint.shards import STEM
from porter.checkpoint.sink import TensorSink
from porter.checkpoint.staging import flush, open_staging, part, publish
from porter.checkpoint.strict_json import listed, shown
from porter.errors import PorterError

SHARD_BYTES = 5_000_000_000
COMMIT_BYTES = 1 << 28
"""Bytes written between two lines of the journal: what a killed run has to do again, at most."""

logger = logging.getLogger("porter.checkpoint")

__all__ = ["CheckpointWriter", "TensorPlan"]


class CheckpointWriter:
    """Streams the tensors of `plan` into `directory`, which appears only when `finish` has found all of them.

    Until then everything lies in `self.directory`, "<directory>.partial": shards whose headers are written first and
    whose tensors are written at their place in any order, from any thread, and a journal of the tensors done. Files
    that others put into `self.directory` before `finish` move along. A run that stops is continued by one with the
    same plan and source; another plan or source starts over. Both are logged as a warning of "porter.checkpoint".
    """

    def __init__(
        self,
        directory: str | Path,
        plan: Sequence[TensorPlan],
        *,
        shard_bytes: int = SHARD_BYTES,
        metadata: Mapping[str, str] | None = None,
        commit_bytes: int = COMMIT_BYTES,
        stem: str = STEM,
    ) -> None:
        """Lay out the plan; touches no disk. Raises PorterError for a bad plan or a `directory` that is not empty."""
        self.target = Path(os.path.abspath(directory))
        self.directory = self.target.with_name(self.target.name + ".partial")
        if self.target.exists() and (not self.target.is_dir() or any(self.target.iterdir())):
            raise PorterError(f"{self.target}: already exists and is not empty; name another output or remove it")
        if shard_bytes <= 0:
            raise PorterError(f"shard_bytes is {shard_bytes}; expected a positive number of bytes")
        self.layout = plan_layout(plan, shard_bytes, {"format": "pt"} if metadata is None else metadata, stem)
        self._commit_bytes = commit_bytes
        self._journal: Journal | None = None
        self._claimed: set[str] = set()
        self._pending: dict[str, str] = {}
        self._pending_bytes = 0
        self._lock = threading.RLock()

    def start(self, source: str = "") -> frozenset[str]:
        """Begin or resume; returns the tensors that an earlier run finished and that `write` refuses to write again.

        `source` identifies what the tensors are computed from (`Checkpoint.fingerprint`): an unfinished conversion of
        another one is not continued. Raises PorterError for a foreign "<directory>.partial", another process at work
        in it, and too little disk space.
        """
        with self._lock, self._naming_the_path():
            if self._journal is not None:
                raise PorterError(f"{self.directory}: was started already; make another CheckpointWriter")
            self._journal, note = open_staging(self.directory, self.layout, {"source": source})
            if note:
                logger.warning(note)
            self._claimed = set(self._journal.finished)
            return frozenset(self._claimed)

    @property
    def remaining(self) -> tuple[str, ...]:
        """Planned tensors that are not written yet, in the order of the plan."""
        done = self.digests
        return tuple(name for name in self.layout.places if name not in done)

    @property
    def digests(self) -> dict[str, str]:
        """Tensor -> SHA-256 of its bytes, for those written so far."""
        with self._lock:
            finished = {} if self._journal is None else self._journal.finished
            return {**finished, **self._pending}

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor to its place; from any device, strided or not. Thread-safe.

        Raises PorterError for a name that is not planned or was written before, and for another dtype or shape than
        planned.
        """
        with self.sink(name) as sink:
            sink.append(tensor)

    @contextmanager
    def sink(self, name: str) -> Iterator[TensorSink]:
        """Write one tensor piece by piece: append its rows in order; leaving the context completes it.

        Raises PorterError as `write` does, and where rows are missing. A tensor whose context fails is not written.
        """
        place = self._claim(name)
        try:
            with self._naming_the_path():
                file = part(self.directory, place.shard).open("r+b", buffering=0)
                file.seek(place.offset)
            with file:
                sink = TensorSink(self.directory, place.plan, file)
                yield sink
            digest = sink.close()
        except BaseException:
            with self._lock:
                self._claimed.discard(name)
            raise
        with self._lock:
            self._pending[name] = digest
            self._pending_bytes += place.plan.nbytes
            if self._pending_bytes >= self._commit_bytes:
                self._commit()

    def close(self) -> None:
        """Record what is written and release the directory, to be resumed by another writer."""
        with self._lock:
            if self._journal is not None:
                self._commit()
                self._journal.close()

    def finish(self) -> Path:
        """Check that every planned tensor is written, write the index, and move the directory into place; its path.

        Everything is flushed to disk before the move. Raises PorterError naming tensors that are missing.
        """
        with self._lock, self._naming_the_path():
            journal = self._started()
            if self.remaining:
                raise PorterError(
                    f"{self.directory}: {len(self.remaining)} of {len(self.layout.places)} planned tensors were not "
                    f"written ({listed(list(self.remaining))}); write them before finish()"
                )
            self._commit()
            publish(self.directory, self.target, self.layout, journal)
            return self.target

    def _claim(self, name: str) -> Place:
        place = self.layout.places.get(name)
        if place is None:
            raise PorterError(f"{self.directory}: tensor {shown(name)} is not in the plan; add it or drop it")
        with self._lock:
            self._started()
            if name in self._claimed:
                raise PorterError(f"{self.directory}: tensor {shown(name)} was written before; write it once")
            self._claimed.add(name)
        return place

    def _started(self) -> Journal:
        if self._journal is None:
            self.start()
        assert self._journal is not None
        return self._journal

    def _commit(self) -> None:
        """Flush the shards that hold pending tensors before the journal says that they are there."""
        if not self._pending:
            return
        for shard in {self.layout.places[name].shard for name in self._pending}:
            flush(part(self.directory, shard))
        self._started().commit(self._pending)
        self._pending, self._pending_bytes = {}, 0

    @contextmanager
    def _naming_the_path(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise PorterError(
                f"{self.directory}: writing failed: {error.strerror or error}; mend the disk and run again to resume"
            ) from error
