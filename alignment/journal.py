"""The journal of a comparison: one line per weight and module, so that one that was interrupted continues where it was.

A journal is a file of lines, each a checksum and JSON: the schema with the key of the comparison, then the weights in
the order of the model and the replayed modules in execution order. A line without its end is what an interruption left
and is dropped; anything else that is wrong makes the whole file void. It is locked while a process uses it and removed
when its comparison ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from porter.alignment.pairing import Pair
from porter.alignment.report import WeightRow
from porter.alignment.settled import Settled
from porter.alignment.weight import JudgedWeight, Weight
from porter.alignment.weight_judgement import judge

SCHEMA = "porter.alignment.journal/1"
WEIGHT, MODULE = "weight", "module"
FOLDER = "alignment"
SYNC_EVERY = 1.0
"""Seconds of work that a loss of power may cost. What a killed process wrote is never lost."""
KEEP_DAYS = 30
"""Journals that nobody came back to for so long are removed."""

MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError)


def to_stderr(line: str) -> None:
    """One plain line on stderr."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Resumption:
    """That a comparison can be continued. `fresh`: what was found before is ignored; `say`: where to tell of it."""

    fresh: bool = False
    say: Callable[[str], None] = to_stderr


class InUse(Exception):
    """Another process has the journal."""


class Journal:
    """The open and locked journal of one comparison, called `key`; see `journaling`."""

    def __init__(self, path: Path, key: str, resumption: Resumption) -> None:
        self._path = path
        self._key = key
        self._say = resumption.say
        self._synced = time.monotonic()
        self._total = 0
        self._entered = {WEIGHT: 0, MODULE: 0}
        self._file: BinaryIO | None = _locked(path)
        self._found: dict[str, list[Any]] = {WEIGHT: [], MODULE: []}
        self._begin() if resumption.fresh else self._read(self._file)

    def weights(self) -> list[WeightRow]:
        """The rows of the weights that were compared before, in order."""
        try:
            return [WeightRow(**row) for row in self._found[WEIGHT]]
        except MALFORMED as error:
            self._ignore(f"{type(error).__name__}: {error}")
            return []

    def resumed(self, pairs: Sequence[Pair], device: torch.device) -> list[Settled]:
        """What was found before of the first of `pairs`, tensors on `device`."""
        self._total = len(pairs)
        lines = self._found[MODULE]
        found: list[Settled] = []
        try:
            if len(lines) > len(pairs):
                raise ValueError(f"{len(lines)} modules where there are {len(pairs)}")
            found = [Settled.from_json(line, pair, device) for line, pair in zip(lines, pairs, strict=False)]
        except MALFORMED as error:
            self._ignore(f"{type(error).__name__}: {error}")
        if found:
            self._say(f"resuming: {len(found):,} of {len(pairs):,} modules were compared before")
        elif self._found[WEIGHT]:
            self._say(f"resuming: {len(self._found[WEIGHT]):,} weights were compared before")
        self._entered = {WEIGHT: 0, MODULE: len(found)}
        return found

    def enter_weight(self, row: WeightRow) -> None:
        """Write down what was found of the next weight."""
        self._enter(WEIGHT, asdict(row))

    def enter(self, settled: Settled) -> None:
        """Write down what was found of the next module."""
        self._enter(MODULE, settled.to_json())

    def interrupted(self) -> None:
        """Say where the same command would continue."""
        weights, modules = self._entered[WEIGHT], self._entered[MODULE]
        if self._file is not None and (weights or modules):
            done = f"{modules:,} of {self._total:,} modules" if modules else f"{weights:,} weights"
            self._say(f"interrupted after {done}: the same command continues there")

    def close(self, finished: bool) -> None:
        """Let go of the file; remove it where the comparison is `finished`."""
        if self._file is None:
            return
        if finished:
            self._path.unlink(missing_ok=True)
        self._file.close()
        self._file = None

    def _enter(self, kind: str, content: Any) -> None:
        self._write([kind, content])
        self._entered[kind] += 1

    def _read(self, file: BinaryIO) -> None:
        whole = file.read()
        whole = whole[: whole.rfind(b"\n") + 1]
        if not whole:
            self._begin()
            return
        for number, line in enumerate(whole.splitlines()):
            digest, _, content = line.partition(b" ")
            if digest != self._checksum(content):
                self._ignore(f"line {number + 1} was changed" if number else "another schema or key")
                return
            kind, value = json.loads(content)
            if number == 0 and (kind, value) != (SCHEMA, self._key):
                self._ignore("another schema or key")
                return
            if number:
                self._found[kind].append(value)
        file.seek(len(whole))
        file.truncate()

    def _ignore(self, why: str) -> None:
        self._say(f"{self._path}: ignored, not a whole journal ({why[:80]}): everything is compared anew")
        self._begin()

    def _begin(self) -> None:
        if self._file is not None:
            self._file.seek(0)
            self._file.truncate()
            self._found = {WEIGHT: [], MODULE: []}
            self._write([SCHEMA, self._key])

    def _write(self, content: Any) -> None:
        if self._file is None:
            return
        line = json.dumps(content).encode()
        try:
            self._file.write(self._checksum(line) + b" " + line + b"\n")
            self._file.flush()
            if time.monotonic() - self._synced >= SYNC_EVERY:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()
        except OSError as error:
            self._say(f"{self._path}: {error.strerror}: from here on an interruption loses what was compared")
            self.close(finished=True)

    def _checksum(self, content: bytes) -> bytes:
        return hashlib.sha256(self._key.encode() + content).hexdigest()[:16].encode()


@contextmanager
def journaling(folder: Path, key: str, resumption: Resumption) -> Iterator[Journal | None]:
    """The journal called `key` in `folder` while the context lasts, and removed if it ends well.

    None, which is said, where another process has it, or the system has no place or no locks for it.
    """
    path = folder / f"{key}.jsonl"
    journal = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_forgotten(folder)
        journal = Journal(path, key, resumption)
    except InUse:
        resumption.say("another process compares the same: this one cannot be continued if it is interrupted")
    except OSError as error:
        resumption.say(f"{folder}: {error.strerror}: this comparison cannot be continued if it is interrupted")
    finished = False
    try:
        yield journal
        finished = True
    except KeyboardInterrupt:
        if journal is not None:
            journal.interrupted()
        raise
    finally:
        if journal is not None:
            journal.close(finished)


def journaled(weights: Iterable[Weight], journal: Journal | None) -> Iterator[JudgedWeight]:
    """Every weight judged: the first ones as the journal knows them, the others now, which it is told."""
    known = [] if journal is None else journal.weights()
    for index, weight in enumerate(weights):
        row = known[index] if index < len(known) else None
        if row is not None and (row.parameter, row.source) == (weight.name, weight.source):
            yield JudgedWeight(weight, row)
            continue
        judged = judge(weight)
        if journal is not None:
            journal.enter_weight(judged.row)
        yield judged


def _locked(path: Path) -> BinaryIO:
    """The file, created where it is missing, locked for this process. Raises InUse, or OSError."""
    try:
        import fcntl
    except ImportError as error:
        raise OSError(0, "this system has no file locks") from error
    while True:
        file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise InUse from error
        except OSError:
            file.close()
            raise
        # Whoever had it may have removed it between opening and locking.
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            return file
        file.close()


def _remove_forgotten(folder: Path) -> None:
    oldest = time.time() - KEEP_DAYS * 86400
    for path in folder.glob("*.jsonl"):
        try:
            if path.stat().st_mtime < oldest:
                path.unlink()
        except FileNotFoundError:
            continue
