"""`porter golden gather`: the recordings of the ranks of one parallel run, put together to one of the whole model.

Tensors that every rank holds whole must be equal: where one rank has another value (a sum over the ranks that was left
out, a rank with other weights), the value of most ranks is kept, that of the first where all differ, and module, rank
and distance are listed in the manifest under ``gathered``.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from porter.errors import PorterError
from porter.golden.gathering import Gathering
from porter.golden.shard_layout import Rule, rules_of
from porter.golden.store import Golden
from porter.golden.writer import Writer, check_directory


def gather(
    ranks: Sequence[Golden | str | Path],
    output: str | Path,
    rules: Sequence[Rule] | None = None,
    model: dict[str, Any] | None = None,
) -> Golden:
    """Put the goldens of all ranks, given in their order, together to one at ``output``.

    ``rules``: see `shard_layout`; by default its ``DEFAULTS``. ``model`` describes the whole model as a manifest does;
    without it the class of rank 0 stands there, with neither config nor weights. PorterError for ranks that were not
    recorded in full on the same tokens, that are in another order, or whose tensors do not fit the layout.
    """
    goldens = [rank if isinstance(rank, Golden) else Golden.open(rank) for rank in ranks]
    _check_ranks(goldens)
    check_directory(Path(output))
    gathering = Gathering(goldens, tuple(rules or rules_of(None)))
    writer = Writer(output, _header(goldens, model))
    try:
        gathering.write(writer)
        gathered = {"ranks": [str(golden.path.resolve()) for golden in goldens], "unequal": gathering.unequal}
        first = goldens[0].manifest
        omitted = [{"module": name, "why": "the ranks do not call it alike"} for name in gathering.omitted()]
        writer.finish({"missed": [*first["missed"], *omitted], "shared": first["shared"], "gathered": gathered})
    finally:
        writer.close()
    return Golden.open(output)


def _check_ranks(goldens: Sequence[Golden]) -> None:
    if len(goldens) < 2:
        raise PorterError("gather: give the goldens of two ranks or more, in their order")
    first = goldens[0]
    for number, golden in enumerate(goldens):
        rank, world = golden.manifest.get("rank"), golden.manifest.get("world_size", len(goldens))
        if rank is not None and rank != number:
            raise PorterError(f"{golden.path}: recorded by rank {rank}, given as rank {number}; give them in order")
        if world != len(goldens):
            raise PorterError(f"{golden.path}: recorded by one of {world} ranks; give all of them, not {len(goldens)}")
        if golden.detail != "full":
            raise PorterError(f"{golden.path}: recorded as {golden.detail}; only --detail full can be put together")
        if golden.manifest["tokens"] != first.manifest["tokens"] or golden.steps != first.steps:
            raise PorterError(f"{golden.path}: recorded on other tokens or steps than {first.path}")


def _header(goldens: Sequence[Golden], model: dict[str, Any] | None) -> dict[str, Any]:
    first = goldens[0].manifest
    kept = ("dtype", "device", "environment", "modules", "prompts", "new_tokens", "sketch_seed", "imported")
    whole = model or {
        **first["model"], "config": None, "checkpoint": None, "digests": None, "weights": False, "unverified": [],
        "tied": {},
    }  # fmt: skip
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"detail": "full", "model": whole, "created": created} | {
        name: first[name] for name in kept if name in first
    }
