"""Reading `--correspondence`: a table of entries, checked field by field before anything is compared by it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from porter.correspondence import Correspondence
from porter.errors import PorterError

KINDS = ("linear", "experts")
FIELDS = ("target", "sources", "sizes", "kind")
WANTED = 'expected a list like [{"target": "...", "sources": ["..."], "sizes": [1]}]'


def read_correspondence(given: Any) -> Correspondence | None:
    """A Correspondence from one, from its JSON data, or from a file of it. PorterError naming file, entry and field."""
    if given is None or isinstance(given, Correspondence):
        return given
    where = "correspondence"
    if isinstance(given, str | Path):
        where = str(given)
        try:
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise PorterError(f"{where}: not readable as JSON ({error}); {WANTED}") from error
    if not isinstance(given, list):
        raise PorterError(f"{where}: holds a {type(given).__name__}; {WANTED}")
    first: dict[str, int] = {}
    for index, entry in enumerate(given):
        _check_entry(f"{where}: entry {index}", entry)
        target = entry["target"]
        if target in first:
            raise PorterError(
                f"{where}: entry {index}: target: {target!r} is that of entry {first[target]}; name a target once"
            )
        first[target] = index
    return Correspondence.from_json(given)


def _check_entry(where: str, entry: Any) -> None:
    if not isinstance(entry, Mapping):
        raise PorterError(f"{where}: is a {type(entry).__name__}; {WANTED}")
    unknown = sorted(str(name) for name in entry if name not in FIELDS)
    if unknown:
        raise PorterError(f"{where}: {unknown[0]}: is no field of an entry; its fields are {', '.join(FIELDS)}")
    for field in FIELDS[:3]:
        if field not in entry:
            raise PorterError(f"{where}: {field}: is missing; {WANTED}")
    target, sources, sizes, kind = (entry.get(field, "linear") for field in FIELDS)
    if not _is_name(target):
        raise PorterError(f"{where}: target: {target!r} is no module name; name one module of the candidate")
    if not isinstance(sources, list) or not sources or not all(_is_name(source) for source in sources):
        raise PorterError(f"{where}: sources: {sources!r} is no list of module names of the golden")
    if kind not in KINDS:
        raise PorterError(f"{where}: kind: {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    if not isinstance(sizes, list) or not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise PorterError(f"{where}: sizes: {sizes!r} is no list of positive row counts, one for each source")
    if kind == "linear" and len(sizes) != len(sources):
        raise PorterError(f"{where}: sizes: {len(sizes)} for {len(sources)} sources; give the rows of each source")
    if kind == "experts" and len(sources) % len(sizes):
        raise PorterError(f"{where}: sizes: {len(sizes)} parts do not divide {len(sources)} sources; give one expert's")
    repeated = [source for source in sources if sources.count(source) > 1]
    if repeated:
        raise PorterError(f"{where}: sources: {repeated[0]!r} is named twice; name each source once")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and value == value.strip()


def check_names(given: Any, table: Correspondence, candidate: Collection[str], golden: Collection[str]) -> None:
    """Refuse targets that the candidate lacks and sources that the golden does not have. Names are of modules, or of
    parameters where an entry's kind is "experts" (then nothing is known of them here)."""
    where = str(given) if isinstance(given, str | Path) else "correspondence"
    for index, entry in enumerate(table.entries):
        if entry.kind != "linear":
            continue
        _check_known(f"{where}: entry {index}: target", (entry.target,), candidate, "the candidate")
        _check_known(f"{where}: entry {index}: sources", entry.sources, golden, "the golden")


def _check_known(where: str, names: Sequence[str], known: Collection[str], side: str) -> None:
    from difflib import get_close_matches

    for name in names:
        if name not in known:
            near = get_close_matches(name, list(known), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise PorterError(f"{where}: {side} has no module {name!r}{hint}")
