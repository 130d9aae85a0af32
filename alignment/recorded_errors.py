"""Two recordings against each other: the error of every output where both models were given the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from porter.alignment.calls import Recorded
from porter.alignment.lanes import real
from porter.alignment.observation import first_tensor, relative
from porter.alignment.pairing import Pair, Pairing
from porter.alignment.report import ModuleRow, Tokens
from porter.alignment.routing import choice_of
from porter.alignment.tokens import TokenCount
from porter.golden.format import Record, dtype_of
from porter.golden.node import tensor_nodes
from porter.golden.store import Golden


class EndToEnd:
    """Outputs of the two recordings against each other, over the steps at which both were given the same tokens."""

    def __init__(self, golden: Golden, candidate: Golden, pairing: Pairing) -> None:
        self._pairing = pairing
        self._golden = Recorded(golden, torch.float32, torch.device("cpu"))
        self._candidate = Recorded(candidate, torch.float32, torch.device("cpu"))
        self.reasons: list[str] = []
        self._steps = self._common_steps()
        self._flips: dict[int, list[tuple[int, Tensor]]] = {}

    def _common_steps(self) -> set[int]:
        mine, theirs = self._candidate.records.get("", []), self._golden.records.get("", [])
        steps: set[int] = set()
        diverged: set[int] = set()
        for one, other in zip(mine, theirs, strict=False):
            a, b = (_tensor(r.golden.value(x.inputs)) for r, x in ((self._candidate, one), (self._golden, other)))
            if (
                a is not None
                and b is not None
                and a.shape == b.shape
                and torch.equal(a, b)
                and one.batch not in diverged
            ):
                steps.add(one.step)
            else:
                diverged.add(one.batch)
        if diverged or len(mine) != len(theirs) or not steps:
            total = max(len(mine), len(theirs))
            self.reasons.append(f"end to end: {total - len(steps)} of {total} steps were given other tokens")
        return steps

    def joined(self, pair: Pair, rows: list[ModuleRow]) -> list[ModuleRow]:
        """The rows with their end-to-end error."""
        return [replace(row, end_to_end=self._error(pair, row.step)) for row in rows]

    def _error(self, pair: Pair, step: int) -> float | None:
        if step not in self._steps:
            return None
        mine = self._candidate.at(pair.module, step, 0)
        theirs = [self._golden.at(source, step, 0) for source in pair.sources]
        if mine is None or any(record is None for record in theirs):
            return None
        a = _tensor(self._candidate.golden.value(mine.outputs))
        parts = [_tensor(self._golden.golden.value(record.outputs)) for record in theirs if record is not None]
        known = [part for part in parts if part is not None]
        if a is None or len(known) != len(parts) or not a.is_floating_point():
            return None
        b = self._pairing.correspondence.output(pair.module, known)
        keep = self._unflipped(pair, step, self._candidate.keep(mine))
        return relative(a if keep is None else real(a, keep), b if keep is None else real(b, keep))

    def _unflipped(self, pair: Pair, step: int, keep: Tensor | None) -> Tensor | None:
        """`keep` without the tokens that went to other experts in a router before the module, if any are left."""
        if step not in self._flips:
            self._flips[step] = list(self._flips_of(step))
        for position, flipped in self._flips[step]:
            if position <= pair.position:
                left = ~flipped if keep is None else keep & ~flipped
                keep = left if bool(left.any()) else keep
        return keep

    def _flips_of(self, step: int) -> Iterator[tuple[int, Tensor]]:
        """(position, tokens [B, S] with other experts) of every router in a step."""
        root = self._candidate.at("", step, 0)
        tokens = None if root is None else _tensor(self._candidate.golden.value(root.inputs))
        for pair in self._pairing.pairs if tokens is not None else ():
            records = self._candidate.at(pair.module, step, 0), self._golden.at(pair.sources[0], step, 0)
            if records[0] is None or records[1] is None or not _chooses(records[0]):
                continue
            mine, theirs = (
                choice_of(nn.Identity(), side.golden.value(record.outputs))[0]
                for side, record in zip((self._candidate, self._golden), records, strict=True)
                if record is not None
            )
            if mine is not None and theirs is not None and tokens is not None:
                flipped = mine.flipped(theirs)
                if flipped is not None and flipped.numel() == tokens.numel():
                    yield pair.position, flipped.view(tokens.shape)

    def tokens(self) -> Tokens | None:
        """The logits of the two roots against each other."""
        count = TokenCount()
        for step in sorted(self._steps):
            pair = [(r, r.at("", step, 0)) for r in (self._candidate, self._golden)]
            logits = [_logits(r.golden.value(record.outputs)) for r, record in pair if record is not None]
            if len(logits) != 2 or logits[0] is None or logits[1] is None or logits[0].shape != logits[1].shape:
                continue
            record = pair[0][1]
            keep = None if record is None else self._candidate.keep(record)
            rows = [t if keep is None else real(t, keep) for t in logits if t is not None]
            count.add(*(row.reshape(-1, row.shape[-1]) for row in rows))
        return count.result()


def _tensor(value: object) -> Tensor | None:
    return first_tensor(list(value.values()) if isinstance(value, dict) else value)


def _chooses(record: Record) -> bool:
    """Whether a record's output may be a router's: it holds integers, which is told without reading it."""
    return any(not dtype_of(node["dtype"]).is_floating_point for node in tensor_nodes(record.outputs))


def _logits(value: object) -> Tensor | None:
    logits = getattr(value, "logits", None)
    return logits if isinstance(logits, Tensor) and logits.dim() == 3 else None
