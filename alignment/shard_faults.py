"""What is wrong with the shards of a candidate that lies on ranks: which rank holds what, and in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from porter.alignment.pairing import Pairing
from porter.alignment.rank_layout import rows_of
from porter.alignment.rank_shards import Held, RankShards
from porter.alignment.report import Cause
from porter.alignment.shard_orders import other_orders
from porter.alignment.streaming import Tensors
from porter.alignment.streaming_files import layout_of
from porter.alignment.verdict import owner_of
from porter.alignment.weight import JudgedWeight
from porter.alignment.weight_judgement import COPY, distance
from porter.correspondence import Entry

SURE, PARTLY = 0.99, 0.6
"""Confidence where the fault undone leaves the source's weight; where it only says which ranks are wrong."""


@dataclass
class ShardFaults:
    """Judges the ranks' shares of the weights of `source`, which is read from its files whatever it has adopted."""

    shards: RankShards
    source: nn.Module
    pairing: Pairing
    explained: set[str] = field(default_factory=set)
    """The modules whose weights drift for a cause that is certain."""
    _experts: dict[str, Entry] = field(init=False)

    def __post_init__(self) -> None:
        self._known = Tensors(self.source)
        self._experts = {entry.target: entry for entry in layout_of(self.source) if entry.kind == "experts"}

    def judged(self, judged: JudgedWeight) -> JudgedWeight:
        """The weight, drifting where the ranks that should hold the same of it do not."""
        unequal = [each for held in self._held(judged.weight.name) for each in self.shards.unequal(held)]
        if not unequal:
            return judged
        worst = max(each.error for each in unequal)
        why = f"{_ranks([each.rank for each in unequal])} differs from the other ranks, by {worst:.2g}"
        error = max(worst, judged.row.error or 0.0)
        return replace(judged, row=replace(judged.row, status="drift", error=error, why=why))

    def causes(self, weights: Sequence[JudgedWeight]) -> list[Cause]:
        """One cause for each weight whose shards account for its drift; of fused ones for all of it."""
        found: dict[tuple[str, str], Cause] = {}
        for judged in weights:
            held = self._held(judged.weight.name)
            if judged.row.status == "drift" and held:
                cause = self._of_experts(judged, held) if len(held) > 1 else self._of_one(judged, held[0])
                if cause is not None and cause.confidence >= SURE:
                    self.explained.add(owner_of(judged, self.pairing))
                if cause is not None:
                    found.setdefault((held[0].name, cause.says), cause)
        return list(found.values())

    def _held(self, name: str) -> list[Held]:
        entry = self._experts.get(name)
        sources = (name,) if name in self.shards or entry is None else entry.sources
        return [self.shards.held[source] for source in sources if source in self.shards]

    def _of_one(self, judged: JudgedWeight, held: Held) -> Cause | None:
        pieces, spread = self.shards.pieces(held), held.spread
        reference = torch.cat([self._known.own(name) for name in held.sources]) if held.sizes[1:] else None
        whole = (self._known.own(held.sources[0]) if reference is None else reference).to(pieces[0].dtype)
        unequal = self.shards.unequal(held)
        if unequal:
            says = f"{held.name}: {_ranks([u.rank for u in unequal])} holds something else than the other ranks"
            return self._cause("weight-stale", judged, PARTLY, None, f"{says}: load that rank's weights anew")
        limit = max(judged.row.expected or 0.0, COPY)
        owners = _owners(dict(zip(spread.holders, pieces, strict=True)),
                         dict(zip(spread.holders, spread.deal(whole), strict=True)), limit)  # fmt: skip
        if any(owner is None for owner in owners.values()):
            for order, join in other_orders(spread, held.sizes, self._head()):
                after = distance(join(pieces), whole)[0]
                if after <= limit:
                    says = f"{held.name}: {order}, but it is read otherwise; say so with --layout, or write it anew"
                    return self._cause("head-permutation", judged, SURE, after, says)
        experts = spread.dim == 0 and rows_of(spread.whole) > 0
        return self._misplaced(judged, held.name, owners, "experts" if experts else "part")

    def _of_experts(self, judged: JudgedWeight, held: Sequence[Held]) -> Cause | None:
        """Experts that lie on one rank each, compared rank by rank."""
        entry = self._experts[judged.weight.name]
        if any(len(each.names) > 1 for each in held) or len(held) != len(entry.sources):
            return None
        expected = entry.split(self._known.own(judged.weight.name))
        mine: dict[int, list[Tensor]] = {}
        theirs: dict[int, list[Tensor]] = {}
        for each, tensor in zip(held, expected, strict=True):
            rank = each.spread.holders[0]
            mine.setdefault(rank, []).append(self.shards.pieces(each)[0].flatten())
            theirs.setdefault(rank, []).append(tensor.flatten())
        pieces = {rank: torch.cat(tensors) for rank, tensors in mine.items()}
        wanted = {rank: torch.cat(tensors).to(pieces[rank].dtype) for rank, tensors in theirs.items()}
        limit = max(judged.row.expected or 0.0, COPY)
        return self._misplaced(judged, judged.weight.name, _owners(pieces, wanted, limit), "experts")

    def _misplaced(self, judged: JudgedWeight, name: str, owners: Mapping[int, int | None], what: str) -> Cause | None:
        wrong = {rank: owner for rank, owner in owners.items() if owner != rank}
        moved = {rank: owner for rank, owner in wrong.items() if owner is not None}
        if moved:
            told = ", ".join(f"rank {rank} holds the {what} of rank {owner}" for rank, owner in moved.items())
            permuted = set(moved) == set(moved.values()) and len(moved) == len(wrong)
            also = "" if permuted else f"; nobody holds that of {_ranks(sorted(set(wrong) - set(moved.values())))}"
            kind = "expert-permutation" if what == "experts" else "weight-permuted"
            return self._cause(kind, judged, SURE, 0.0 if permuted else None, f"{name}: {told}{also}")
        if wrong and len(wrong) < len(owners):
            says = f"{name}: only {_ranks(list(wrong))} is wrong; the others hold what the source has"
            return self._cause("weight-stale", judged, PARTLY, None, says)
        return None

    def _cause(self, kind: str, judged: JudgedWeight, confidence: float, after: float | None, says: str) -> Cause:
        return Cause(kind, owner_of(judged, self.pairing), confidence, judged.row.error or 0.0, after, says)

    def _head(self) -> int:
        config = getattr(self.source, "config", None)
        heads = getattr(config, "num_attention_heads", None) or 1
        return int(getattr(config, "head_dim", None) or getattr(config, "hidden_size", heads) // heads)


def _owners(pieces: Mapping[int, Tensor], wanted: Mapping[int, Tensor], limit: float) -> dict[int, int | None]:
    """Whose piece each rank holds: its own, else the first that it equals, else None."""
    found: dict[int, int | None] = {}
    for rank, piece in pieces.items():
        order = (rank, *(other for other in wanted if other != rank))
        alike = (s for s in order if wanted[s].shape == piece.shape and distance(piece, wanted[s])[0] <= limit)
        found[rank] = next(alike, None)
    return found


def _ranks(numbers: Sequence[int]) -> str:
    named = [str(number) for number in dict.fromkeys(numbers)]
    return f"rank {named[0]}" if len(named) == 1 else f"ranks {', '.join(named[:-1])} and {named[-1]}"
