"""The key of a comparison: a digest of everything that its result depends on."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import porter
from porter.golden.format import HEADER, INDEX, MANIFEST, RECORDS
from porter.golden.store import Golden

LARGEST = 4 << 20
"""Bytes of the largest file that counts by its content; larger ones count by name, size and time."""
START = 1 << 20
"""Bytes of a safetensors file that count by their content: its header, or most of it."""
OWN_REPORT = "alignment.json"
"""What `porter align` itself writes into a directory of `porter adapt`."""
PACKAGES = ("porter", "porter.models", "porter.kernels", "porter.golden", "porter.alignment")
CODE = (".py", ".cpp", ".h")


def key_of(golden: Golden, candidate: Path, settings: Mapping[str, Any]) -> str:
    """The key of comparing the directory `candidate` with `golden` under `settings` (plain data).

    The golden counts by its manifest, records and index, which holds the digest of every tensor and weight file; the
    candidate by all its files, those of safetensors by their start, size and time of change; porter by its version and
    its files.
    """
    digest = hashlib.sha256(json.dumps([porter.__version__, settings], sort_keys=True, default=str).encode())
    for part in (code_stamp(), *_golden_files(golden.path), *_candidate_files(candidate)):
        digest.update(b"\0" + part)
    return digest.hexdigest()[:32]


@cache
def code_stamp() -> bytes:
    """Names, sizes and times of porter's own files when it was first asked for: of the code that this process runs."""
    folders = {folder for name in PACKAGES for folder in importlib.import_module(name).__path__}
    found = []
    for folder in sorted(folders):
        for path in sorted(Path(folder).rglob("*")):
            if path.suffix in CODE:
                found.append(_stat(path, path.relative_to(folder)))
    return hashlib.sha256(b"".join(found)).digest()


def _golden_files(folder: Path) -> Iterator[bytes]:
    for name in (HEADER, MANIFEST, RECORDS, INDEX):
        path = folder / name
        yield name.encode() + (path.read_bytes() if path.exists() else b"")


def _candidate_files(folder: Path) -> Iterator[bytes]:
    yield str(folder.resolve()).encode()
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        for name in sorted(files):
            path = Path(root) / name
            if name == OWN_REPORT or not path.is_file():
                continue
            yield _stat(path, path.relative_to(folder)) if _by_stat(path) else name.encode() + path.read_bytes()
            if path.suffix == ".safetensors":
                with path.open("rb") as file:
                    yield file.read(START)


def _by_stat(path: Path) -> bool:
    return path.suffix == ".safetensors" or path.stat().st_size > LARGEST


def _stat(path: Path, name: Path) -> bytes:
    found = path.stat()
    return f"{name}\0{found.st_size}\0{found.st_mtime_ns}\0".encode()
