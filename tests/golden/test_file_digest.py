"""A file's digest is remembered, and no change of the file is missed."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from porter.golden import file_digest as module
from porter.golden.file_digest import FOLDER, file_digest


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files read whole so far; the cache is a folder of the test's own."""
    monkeypatch.setenv("PORTER_CACHE", str(tmp_path / "cache"))
    read: list[Path] = []
    hashed = module.hashed

    def counted(path: Path) -> str:
        read.append(path)
        return hashed(path)

    monkeypatch.setattr(module, "hashed", counted)
    return read


def _rested(path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, as if it had been written long ago."""
    path.write_bytes(content)
    later = time.time_ns() + 10_000_000_000
    monkeypatch.setattr(module.time, "time_ns", lambda: later)
    return path


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_an_unchanged_file_is_read_once(tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    file = _rested(tmp_path / "file", b"content", monkeypatch)
    (tmp_path / "link").symlink_to(file)
    assert {file_digest(path) for path in (file, file, tmp_path / "link")} == {_sha256(b"content")}
    assert reads == [file]


def test_changes_are_seen(tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of equal size whose time of modification was put back, and another file of equal times put in place."""
    file = _rested(tmp_path / "file", b"content", monkeypatch)
    file_digest(file)
    before = file.stat()
    time.sleep(0.02)
    file.write_bytes(b"CONTENT")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert file_digest(file) == _sha256(b"CONTENT")
    other = tmp_path / "other"
    other.write_bytes(b"c0ntent")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)
    assert file_digest(file) == _sha256(b"c0ntent") and len(reads) == 3


def test_a_file_just_written_is_not_remembered(tmp_path: Path, reads: list[Path]) -> None:
    """It may be written again within the same tick of the clock."""
    file = tmp_path / "file"
    file.write_bytes(b"content")
    assert file_digest(file) == file_digest(file) == _sha256(b"content") and len(reads) == 2


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"state": null}', b"\xff"])
def test_a_damaged_memory_is_not_believed(
    damage: bytes, tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _rested(tmp_path / "file", b"content", monkeypatch)
    file_digest(file)
    (entry,) = (tmp_path / "cache" / FOLDER).iterdir()
    entry.write_bytes(damage)
    assert file_digest(file) == _sha256(b"content") and len(reads) == 2


def test_a_cache_that_cannot_be_written(tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    file = _rested(tmp_path / "file", b"content", monkeypatch)
    (tmp_path / "cache").write_bytes(b"a file, not a folder")
    assert file_digest(file) == file_digest(file) == _sha256(b"content") and len(reads) == 2
