"""Which candidate module is compared with which recorded modules, in execution order, and whose children are forced."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from porter.correspondence import Correspondence
from porter.errors import PorterError
from porter.golden.format import Record
from porter.golden.store import Golden

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class Pair:
    """A candidate module and the recorded source modules that make it up. `position`: its place in execution order."""

    module: str
    sources: tuple[str, ...]
    position: int

    @property
    def source(self) -> str:
        """The sources as a report names them."""
        return ", ".join(self.sources)


@dataclass(frozen=True)
class Pairing:
    """All pairs in execution order, and what has no counterpart."""

    pairs: tuple[Pair, ...]
    unmatched_golden: tuple[str, ...]
    unmatched_candidate: tuple[str, ...]
    correspondence: Correspondence

    @cached_property
    def by_module(self) -> dict[str, Pair]:
        """Pairs by the candidate's name."""
        return {pair.module: pair for pair in self.pairs}

    @cached_property
    def by_source(self) -> dict[str, Pair]:
        """Pairs by each source name."""
        return {source: pair for pair in self.pairs for source in pair.sources}

    @cached_property
    def _children(self) -> dict[str, list[Pair]]:
        found: dict[str, list[Pair]] = {pair.module: [] for pair in self.pairs}
        for pair in self.pairs:
            parent = _nearest_above(pair.module, found)
            if parent is not None:
                found[parent].append(pair)
        return found

    def children(self, pair: Pair) -> list[Pair]:
        """The pairs below `pair` with no other pair in between."""
        return self._children[pair.module]


def relative_name(name: str, parent: str) -> str:
    """`name` seen from the module `parent` that contains it."""
    return name if not parent else name.removeprefix(f"{parent}.")


def pair_modules(golden: Golden, candidate: Iterable[str], correspondence: Correspondence) -> Pairing:
    """Pair the candidate's module names with the golden's records.

    A candidate module is paired when every source that the correspondence gives for it (itself by default) was
    recorded. Raises PorterError when not a single one is.
    """
    order = execution_order(golden.records)
    aliases: dict[str, str] = dict(golden.manifest.get("shared") or {})
    pairs, alone = [], []
    for name in candidate:
        sources = tuple(aliases.get(source, source) for source in correspondence.source_of(name))
        if all(source in order for source in sources):
            pairs.append(Pair(name, sources, max(order[source] for source in sources)))
        else:
            alone.append(name)
    if not any(pair.module for pair in pairs):
        raise PorterError(
            "no module of the candidate has the name of a recorded one; map the names with --correspondence FILE"
        )
    pairs.sort(key=lambda pair: pair.position)
    paired = {source for pair in pairs for source in pair.sources}
    unmatched = tuple(name for name in order if name not in paired)
    return Pairing(tuple(pairs), unmatched, tuple(alone), correspondence)


def module_names(model: nn.Module) -> list[str]:
    """The names of the modules that can be called: everything but containers."""
    return [name for name, module in model.named_modules() if not isinstance(module, CONTAINERS)]


def execution_order(records: Iterable[Record]) -> dict[str, int]:
    """Module name to the position of its first return; a parent comes after its children."""
    order: dict[str, int] = {}
    for position, record in enumerate(records):
        order.setdefault(record.module, position)
    return order


def selection(modules: str | None) -> re.Pattern[str] | None:
    """The pattern of `--modules`; PorterError where it is no regular expression."""
    try:
        return None if modules is None else re.compile(modules)
    except re.error as error:
        raise PorterError(f"--modules {modules!r} is not a regular expression: {error}") from error


def selected(pairing: Pairing, pattern: re.Pattern[str] | None) -> list[Pair]:
    """The pairs whose name matches; PorterError where none does: nothing would be compared."""
    pairs = [pair for pair in pairing.pairs if pattern is None or pattern.search(pair.module)]
    if pattern is not None and not pairs:
        names = [pair.module for pair in pairing.pairs if pair.module]
        raise PorterError(
            f"--modules {pattern.pattern!r}: matches none of the {len(names)} modules, such as {names[0]}, {names[-1]}"
        )
    return pairs


def _nearest_above(name: str, known: dict[str, list[Pair]]) -> str | None:
    while name:
        name = name.rpartition(".")[0]
        if name in known:
            return name
    return None
