"""Where the files of a candidate that lies on parallel ranks are: a folder or files for each rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from porter.checkpoint.header import read_header
from porter.checkpoint.reader import Checkpoint
from porter.errors import PorterError

FILES = (
    re.compile(r"model[-_.]rank[-_]?(?P<rank>\d+)(?:[-_]part[-_]?\d+)?\.safetensors"),
    re.compile(r"model(?P<rank>\d+)-mp(?P<world>\d+)\.safetensors"),
    re.compile(r"rank[-_]?(?P<rank>\d+)\.safetensors"),
)
"""One rank's tensors: `model-rank-00.safetensors`, the sharded state of vLLM and SGLang
(`model-rank-0-part-0.safetensors`), and what DeepSeek's own conversion writes (`model0-mp8.safetensors`)."""

FOLDER = re.compile(r"(?:mp_|tp_|ep_)?rank[-_]?(?P<rank>\d+)")
"""`rank0`, `rank_00`, `tp_rank_0`: a folder of safetensors files."""


def rank_checkpoints(directory: Path) -> list[Checkpoint]:
    """The checkpoint of each rank in order; empty for a directory that is not one of ranks.

    PorterError for a rank that is missing, and for both folders and files.
    """
    files, world = _files(directory)
    folders = _folders(directory)
    if files and folders:
        raise PorterError(f"{directory}: holds files of ranks and folders of ranks; remove those that are stale")
    found = files or folders
    if not found:
        return []
    ranks = world or max(found) + 1
    missing = sorted(set(range(ranks)) - found.keys())
    if missing or max(found) >= ranks:
        named = f"rank {missing[0]} is missing" if missing else f"rank {max(found)} is one too many"
        raise PorterError(f"{directory}: {named} of {ranks} ranks; give the shards of all of them")
    if ranks < 2:
        raise PorterError(f"{directory}: holds one rank alone; give the shards of all of them")
    return [_checkpoint(found[rank]) for rank in range(ranks)]


def _files(directory: Path) -> tuple[dict[int, list[Path]], int | None]:
    found: dict[int, list[Path]] = {}
    worlds = set()
    for path in sorted(directory.glob("*.safetensors")):
        match = next((m for pattern in FILES if (m := pattern.fullmatch(path.name))), None)
        if match is not None:
            found.setdefault(int(match["rank"]), []).append(path)
            worlds.add(int(match.groupdict().get("world") or 0))
    if len(worlds) > 1:
        raise PorterError(f"{directory}: files of {len(worlds)} numbers of ranks; remove those that are stale")
    return found, next(iter(worlds), 0) or None


def _folders(directory: Path) -> dict[int, list[Path]]:
    found: dict[int, list[Path]] = {}
    for path in sorted(each for each in directory.iterdir() if each.is_dir()):
        match = FOLDER.fullmatch(path.name)
        if match is not None and (files := sorted(path.glob("*.safetensors"))):
            if int(match["rank"]) in found:
                raise PorterError(f"{directory}: two folders of rank {match['rank']}; remove the stale one")
            found[int(match["rank"])] = files
    return found


def _checkpoint(files: Sequence[Path]) -> Checkpoint:
    headers = {path.name: read_header(path) for path in files}
    seen: dict[str, str] = {}
    for file, header in headers.items():
        for name in header.tensors:
            if seen.setdefault(name, file) != file:
                raise PorterError(f"{files[0].parent / file}: holds {name}, as {seen[name]} does; remove the stale one")
    return Checkpoint(files[0].parent, {path.name: path for path in files}, headers)
