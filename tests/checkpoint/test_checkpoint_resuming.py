"""A writer that was interrupted: what it leaves behind, and how the next one takes it up."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from small_checkpoint import TENSORS, planned, refuses, write

from porter.checkpoint import journal, staging
from porter.checkpoint.reader import Checkpoint
from porter.checkpoint.writer import CheckpointWriter


def interrupted(tmp_path: Path, names: Sequence[str] = ("a", "codes")) -> Path:
    writer = CheckpointWriter(tmp_path / "out", planned(TENSORS), shard_bytes=70)
    writer.start("source 1")
    for name in names:
        writer.write(name, TENSORS[name])
    (writer.directory / "config.json").write_text("{}")
    writer.close()
    return writer.directory


def resume(tmp_path: Path, source: str = "source 1", shard_bytes: int = 70) -> frozenset[str]:
    writer = CheckpointWriter(tmp_path / "out", planned(TENSORS), shard_bytes=shard_bytes)
    finished = writer.start(source)
    assert not (writer.directory / "config.json").exists(), "files of the interrupted run must not stay"
    for name in writer.remaining:
        writer.write(name, TENSORS[name])
    writer.finish()
    write(tmp_path / "fresh", shard_bytes=shard_bytes)
    for path in (tmp_path / "fresh").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
    return finished


def test_an_interrupted_directory_loads_in_nothing(tmp_path: Path) -> None:
    partial = interrupted(tmp_path)
    assert not [p for p in partial.iterdir() if p.suffix == ".safetensors" or p.name.endswith(".index.json")]
    assert refuses(Checkpoint.open, partial) == (
        f"{partial}: is an unfinished conversion; run the same `porter adapt` again to finish it"
    )


def test_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    partial = interrupted(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert resume(tmp_path) == {"a", "codes"}
    assert caplog.messages == [f"{partial}: resuming, 2 of 5 tensors are done"]


@pytest.mark.parametrize("cut", [1, 5])
def test_a_torn_journal_line_is_dropped(tmp_path: Path, cut: int) -> None:
    """Neither is it believed, nor do the lines of the next run run into it."""
    path = interrupted(tmp_path) / journal.NAME
    os.truncate(path, path.stat().st_size - cut)
    assert interrupted(tmp_path, ["b"]) == path.parent
    assert resume(tmp_path) == {"a", "b"}


@pytest.mark.parametrize("content", [b"", b"\x00" * 50, b"[]\n", b"{}\n", b"{not json\n"])
def test_a_journal_of_rubbish_starts_over(tmp_path: Path, content: bytes) -> None:
    (interrupted(tmp_path) / journal.NAME).write_bytes(content)
    assert resume(tmp_path) == frozenset()


def test_damaged_tensors_are_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    partial = interrupted(tmp_path)
    place = CheckpointWriter(tmp_path / "out", planned(TENSORS), shard_bytes=70).layout.places["codes"]
    with staging.part(partial, place.shard).open("r+b") as file:
        file.seek(place.offset)
        file.write(b"\x55")
    assert resume(tmp_path) == {"a"}
    assert "resuming, 1 of 5 tensors are done, 1 damaged ones are written again" in caplog.text


def test_a_missing_shard_is_written_again(tmp_path: Path) -> None:
    for path in interrupted(tmp_path).glob("*.incomplete"):
        path.unlink()
    assert resume(tmp_path) == frozenset()


@pytest.mark.parametrize(("source", "shard_bytes", "differs"), [("source 2", 70, "source"), ("source 1", 90, "layout")])
def test_another_plan_or_source_starts_over_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, source: str, shard_bytes: int, differs: str
) -> None:
    partial = interrupted(tmp_path)
    assert resume(tmp_path, source, shard_bytes) == frozenset()
    assert f"{partial}: holds an unfinished conversion of another {differs}: starting over" in caplog.messages


def test_files_put_beside_the_weights_move_along(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "out", [])
    writer.start()
    (writer.directory / "config.json").write_text("{}")
    writer.finish()
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    assert Checkpoint.open(tmp_path / "out").names == ()
