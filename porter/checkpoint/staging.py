"""The directory in which a checkpoint is assembled: begun, resumed, and moved into place.

Shards carry the suffix `PART` and there is no index until everything is written, so what an interrupted run leaves
behind loads in nothing. A crash between the last renames leaves whole files, which the next run takes up again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from porter.checkpoint import journal as journal_file
from porter.checkpoint.journal import Journal
from porter.checkpoint.layout import Layout, Place
from porter.errors import PorterError

PART = ".incomplete"
CHUNK = 1 << 22


def part(directory: Path, shard: str) -> Path:
    """The file of `shard` while it is being written."""
    return directory / (shard + PART)


def open_staging(directory: Path, layout: Layout, identity: Mapping[str, str]) -> tuple[Journal, str]:
    """Begin or resume the conversion in `directory`: (its journal, what was found there in words, or "").

    A journal of the same layout and `identity` is resumed: each tensor that it lists is read and compared with its
    digest. Anything else of porter's is started over. Raises PorterError for files that are not porter's, another
    process at work, and too little disk space.
    """
    _check_ownership(directory)
    directory.mkdir(parents=True, exist_ok=True)
    journal = Journal(directory / journal_file.NAME)
    try:
        wanted = {"layout": layout.digest(), **identity}
        held = {key: value for key, value in (journal.header or {}).items() if key != "schema"}
        resumes = held == wanted
        _clear(directory, layout if resumes else None)
        note = ""
        if resumes:
            note = _verify(directory, layout, journal)
        else:
            if held:
                differs = ", ".join(sorted(key for key in {*held, *wanted} if held.get(key) != wanted.get(key)))
                note = f"{directory}: holds an unfinished conversion of another {differs}: starting over"
            journal.begin(wanted)
        _check_space(directory, layout)
        _make_shards(directory, layout)
    except BaseException:
        journal.close()
        raise
    return journal, note


def publish(directory: Path, target: Path, layout: Layout, journal: Journal) -> None:
    """Give the shards their names, write the index, flush everything to disk and move `directory` to `target`."""
    for shard in layout.shards:
        size = part(directory, shard.name).stat().st_size
        if size != shard.size:
            raise PorterError(f"{part(directory, shard.name)}: has {size} bytes, planned {shard.size}; run again")
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            flush(path)
    for shard in layout.shards:
        part(directory, shard.name).replace(directory / shard.name)
    if len(layout.shards) > 1:
        _write_index(directory, layout)
    flush(directory)
    directory.replace(target)
    flush(target.parent)
    (target / journal_file.NAME).unlink()
    journal.close()


def flush(path: Path) -> None:
    """fsync a file, or a directory's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_ownership(directory: Path) -> None:
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise PorterError(f"{directory}: is not a directory; remove it: porter assembles its output there")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / journal_file.NAME).is_file():
        raise PorterError(
            f"{directory}: holds files that are no conversion of porter's; remove it: porter assembles its output there"
        )


def _clear(directory: Path, kept: Layout | None) -> None:
    """Remove everything but the journal and the shards of the layout `kept`; whole shards become parts again."""
    names = {shard.name for shard in kept.shards} if kept else set()
    for name in names:
        if (directory / name).is_file():
            (directory / name).replace(part(directory, name))
    keep = {journal_file.NAME, *(name + PART for name in names)}
    for path in directory.iterdir():
        if path.name in keep:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _verify(directory: Path, layout: Layout, journal: Journal) -> str:
    """Drop from the journal what is not on disk as it says; what was found, in words."""
    listed = [name for name in journal.finished if name in layout.places]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(lambda name: _digest(directory, layout.places[name]), listed))
    wrong = {name for name, digest in zip(listed, digests, strict=True) if digest != journal.finished[name]}
    wrong |= journal.finished.keys() - layout.places.keys()
    if wrong:
        journal.forget(wrong)
    damaged = f", {len(wrong)} damaged ones are written again" if wrong else ""
    return f"{directory}: resuming, {len(journal.finished)} of {len(layout.places)} tensors are done{damaged}"


def _digest(directory: Path, place: Place) -> str:
    digest, left = hashlib.sha256(), place.plan.nbytes
    path = part(directory, place.shard)
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(place.offset)
        while left and (chunk := file.read(min(CHUNK, left))):
            digest.update(chunk)
            left -= len(chunk)
    return "" if left else digest.hexdigest()


def _check_space(directory: Path, layout: Layout) -> None:
    """What is still to be allocated must be free: shards are sparse files until they are written."""
    parts = [part(directory, shard.name) for shard in layout.shards]
    allocated = sum(path.stat().st_blocks * 512 for path in parts if path.is_file())
    needed = sum(shard.size for shard in layout.shards) - allocated
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise PorterError(
            f"{directory}: needs {needed / 1e9:.3g} GB, the disk has {free / 1e9:.3g} GB free; free some, or name an "
            "output on another disk"
        )


def _make_shards(directory: Path, layout: Layout) -> None:
    for shard in layout.shards:
        path = part(directory, shard.name)
        path.touch()
        with path.open("r+b") as file:
            file.truncate(shard.size)
            file.write(shard.header)
    flush(directory)


def _write_index(directory: Path, layout: Layout) -> None:
    index = {
        "metadata": {"total_size": layout.total_bytes},
        "weight_map": {name: place.shard for name, place in sorted(layout.places.items())},
    }
    aside = part(directory, layout.index)
    aside.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    flush(aside)
    aside.replace(directory / layout.index)
