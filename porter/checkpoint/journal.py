"""What an unfinished conversion has written so far: appended line by line, readable after any crash."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from porter.errors import PorterError

NAME = "conversion.journal"
SCHEMA = "porter.conversion/1"


class Journal:
    """An open, locked journal; `finished` is tensor -> SHA-256 of its bytes. The lock dies with the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.finished: dict[str, str] = {}
        self.header: Mapping[str, Any] | None = None
        self._file = path.open("ab+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise PorterError(f"{path.parent}: another porter is writing it; wait for it, or stop it") from error
        self._read()

    def begin(self, header: Mapping[str, Any]) -> None:
        """Empty the journal and write its first line."""
        self._file.truncate(0)
        self.finished = {}
        self.header = {"schema": SCHEMA, **header}
        self._append([self.header])

    def commit(self, digests: Mapping[str, str]) -> None:
        """Record tensors whose bytes are on disk already."""
        self._append([{"tensor": name, "sha256": digest} for name, digest in digests.items()])
        self.finished.update(digests)

    def forget(self, names: set[str]) -> None:
        """Take tensors back whose bytes turned out wrong."""
        kept = {name: digest for name, digest in self.finished.items() if name not in names}
        self.begin({key: value for key, value in (self.header or {}).items() if key != "schema"})
        self.commit(kept)

    def close(self) -> None:
        """Release the lock."""
        self._file.close()

    def _append(self, lines: list[Mapping[str, Any]]) -> None:
        self._file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self) -> None:
        """Load the lines up to the first that a crash cut off, and drop the rest."""
        self._file.seek(0)
        whole = 0
        for raw in self._file:
            line = _parse(raw)
            if line is None:
                break
            if self.header is None:
                self.header = line
            else:
                self.finished[str(line.get("tensor"))] = str(line.get("sha256"))
            whole += len(raw)
        self._file.truncate(whole)


def _parse(raw: bytes) -> dict[str, Any] | None:
    if not raw.endswith(b"\n"):
        return None
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None
