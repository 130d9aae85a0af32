"""A candidate's weights that lie on parallel ranks, read as if one checkpoint held them whole.

Fused weights are put together first and then split through the Correspondence, so that the names are the source's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from porter.alignment.rank_layout import Spread, spread_of
from porter.checkpoint.reader import Checkpoint, TensorInfo
from porter.correspondence import Correspondence, Entry
from porter.errors import PorterError
from porter.golden.shard_layout import Rule, rule_of
from porter.golden.shard_sum import distance

EXPERT = re.compile(r"(.*\bexperts\.)(\d+)(\..*)")


@dataclass(frozen=True)
class Held:
    """A weight as the ranks hold it: its name in each of them, how it is spread, and the source's weights it is made
    of, with their rows where there are several."""

    name: str
    names: Mapping[int, str]
    spread: Spread
    sources: tuple[str, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Unequal:
    """A rank that holds something else than its neighbours where all should hold the same."""

    rank: int
    error: float


@dataclass
class RankShards:
    """The tensors of all `ranks` by the source's names; `wholes` are the shapes of the source's weights as checkpoints
    store them. PorterError where shapes, rules and Correspondence do not fit."""

    ranks: Sequence[Checkpoint]
    rules: tuple[Rule, ...]
    correspondence: Correspondence
    wholes: Mapping[str, tuple[int, ...]]
    unknown: list[str] = field(default_factory=list)
    """What the ranks hold and the source has nothing for."""
    _last: tuple[str, Tensor] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.held: dict[str, Held] = {}
        """By the source's names; those of one fused weight share one."""
        targets = {target: (entry, s) for entry in self.correspondence.entries for target, s in entry.parameters()}
        for name, names in self._names().items():
            entry, sources = targets.get(name, (None, (name,)))
            if not all(source in self.wholes for source in sources):
                self.unknown.append(name)
                continue
            held = self._held(name, names, entry, sources)
            self.held |= dict.fromkeys(sources, held)

    def _names(self) -> dict[str, dict[int, str]]:
        """Name in the whole model -> its name on each rank that holds it; local experts are numbered on through."""
        found: dict[str, dict[int, str]] = {}
        for rank, checkpoint in enumerate(self.ranks):
            counts: dict[str, set[str]] = {}
            for expert in filter(None, map(EXPERT.fullmatch, checkpoint.names)):
                counts.setdefault(expert[1], set()).add(expert[2])
            for name in checkpoint.names:
                match = EXPERT.fullmatch(name)
                whole = name
                if match is not None and rule_of(self.rules, name.rpartition(".")[0]).local_experts:
                    whole = f"{match[1]}{int(match[2]) + rank * len(counts[match[1]])}{match[3]}"
                found.setdefault(whole, {})[rank] = name
        return found

    def _held(self, name: str, names: dict[int, str], entry: Entry | None, sources: tuple[str, ...]) -> Held:
        shapes = {rank: self.ranks[rank].info(each).shape for rank, each in names.items()}
        wholes = [self.wholes[source] for source in sources]
        rows = tuple(shape[0] for shape in wholes)
        whole = wholes[0] if len(wholes) == 1 else (sum(rows), *wholes[0][1:])
        if len({self.ranks[rank].info(each).dtype for rank, each in names.items()}) > 1:
            raise PorterError(f"{name}: the ranks hold it in different dtypes; save all of them in one")
        spread = spread_of(name, shapes, whole, self.rules, rows if entry is not None else ())
        return Held(name, names, spread, sources, rows)

    @property
    def names(self) -> tuple[str, ...]:
        """Every weight that the ranks make up, by the source's names."""
        return tuple(self.held)

    def __contains__(self, name: object) -> bool:
        return name in self.held

    def info(self, name: str) -> TensorInfo:
        """Dtype and whole shape; `shard` names the first rank that holds some of it."""
        held = self.held[name]
        rank, own = next(iter(held.names.items()))
        about = self.ranks[rank].info(own)
        size = 1 if about.torch_dtype is None else about.torch_dtype.itemsize
        shape = self.wholes[name]
        return TensorInfo(about.dtype, shape, f"rank {rank}", torch.Size(shape).numel() * size)

    def load(self, name: str) -> Tensor:
        """A fresh tensor, put together of the ranks' pieces."""
        held = self.held[name]
        whole = self.joined(held)
        if len(held.sources) == 1:
            return whole
        parts: tuple[Tensor, ...] = whole.split(list(held.sizes), dim=0)
        return parts[held.sources.index(name)].clone()

    def joined(self, held: Held) -> Tensor:
        """The whole weight as the ranks hold it, fused or not; the last fused one is kept for its other parts."""
        if self._last is not None and self._last[0] == held.name:
            return self._last[1]
        whole = held.spread.join(self.pieces(held))
        self._last = (held.name, whole) if len(held.sources) > 1 else None
        return whole

    def pieces(self, held: Held) -> list[Tensor]:
        """What each holder has, in the order of ranks."""
        return [self.ranks[rank].load(held.names[rank]) for rank in held.spread.holders]

    def unequal(self, held: Held) -> list[Unequal]:
        """The ranks that differ from most of those that should hold the same; of two that differ, the second."""
        found = []
        for group in held.spread.replicas(self.pieces(held)):
            kept = max(group, key=lambda one: sum(torch.equal(one[1], other) for _, other in group))[1]
            found += [Unequal(rank, distance(piece, kept)) for rank, piece in group if not torch.equal(piece, kept)]
        return found
