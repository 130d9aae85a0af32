"""Reading `--correspondence`: a table of entries, whose names must be those of the two models."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from porter.correspondence import EXPECTED, Correspondence
from porter.errors import PorterError


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
            raise PorterError(f"{where}: not readable as JSON ({error}); {EXPECTED}") from error
    return Correspondence.from_json(given, where)


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
