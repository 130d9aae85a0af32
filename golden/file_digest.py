"""SHA-256 of files, remembered for files that have not changed since: a checkpoint is not read whole for every golden.

What is remembered lies in `$PORTER_CACHE` (else `~/.cache/porter`), in a file per path. It counts only as long as the
file's device, inode, size, time of modification and time of change are the same to the nanosecond; the last is set by
the system alone, so restoring the time of modification does not hide a change.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from porter.kernels.cpu.build import cache_directory

FOLDER = "file-digests"

_SETTLED_NS = 2_000_000_000
"""A file must have rested for so long before it was read: one written twice within a tick of the system's clock shows
the same times (2 s is the coarsest tick of a file system in use, FAT's)."""

_BLOCK = 1 << 22


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal: the remembered one of an unchanged file, else read and remembered."""
    entry, state = _entry(path), _state(path)
    held = _read(entry)
    if held is not None and held.get("state") == state and isinstance(held.get("sha256"), str):
        return str(held["sha256"])
    digest = hashed(path)
    if _state(path) == state and time.time_ns() - max(state["modified"], state["changed"]) > _SETTLED_NS:
        # A cache that cannot be written costs time alone.
        with suppress(OSError):
            _write(entry, {"path": str(path.resolve()), "state": state, "sha256": digest})
    return digest


def hashed(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal, read now."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _state(path: Path) -> dict[str, int]:
    """What changes with the content of the file at the end of any links."""
    seen = path.stat()
    return {
        "device": seen.st_dev,
        "inode": seen.st_ino,
        "size": seen.st_size,
        "modified": seen.st_mtime_ns,
        "changed": seen.st_ctime_ns,
    }


def _entry(path: Path) -> Path:
    return cache_directory() / FOLDER / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"


def _read(entry: Path) -> dict[str, Any] | None:
    """None where nothing is remembered, or nothing that can be read."""
    try:
        content = json.loads(entry.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _write(entry: Path, content: dict[str, Any]) -> None:
    """Whole or not at all, whoever else writes it."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    aside = entry.with_name(f".{entry.name}.{os.getpid()}.writing")
    aside.write_text(json.dumps(content), encoding="utf-8")
    aside.replace(entry)
