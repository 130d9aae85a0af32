"""Dtypes: whatever the candidate stores in fewer bits than the golden keeps it in, other than by its declared dtype."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from porter.alignment.contract_lint.contract import Contract
from porter.alignment.contract_lint.kinds import KINDS, is_narrower, kind_of, precision, short
from porter.alignment.report import LintFinding
from porter.correspondence import Correspondence

SCALE = "_scale"
SPARE = "original_inv_freq"
"""A copy that transformers keeps beside the frequencies to go back to: the same finding twice."""


def narrower_tensors(golden: Contract, candidate: Contract, correspondence: Correspondence) -> Iterator[LintFinding]:
    """A finding for every parameter or buffer that is narrower than it must be.

    What the golden stores in its own dtype may be stored in the candidate's. What it keeps wider than its dtype, or its
    class pins to float32, must stay so. Quantized weights (with a scale beside them) are declared, except a router's.
    A narrower tensor that holds the golden's values exactly has lost nothing and is no finding.
    """
    for name, held in candidate.tensors.items():
        sources = [source for source in correspondence.source_of(name) if source in golden.tensors]
        if not sources or name.endswith((SCALE, SPARE)):
            continue
        kind, source = kind_of(name), sources[0]
        theirs = golden.tensors[source]
        if f"{name}{SCALE}" in candidate.tensors:
            if kind == "router-dtype":
                yield _finding(kind, name, short(theirs.dtype), f"{short(held.dtype)} with a scale", False)
            continue
        kept_wider = is_narrower(golden.compute, theirs.dtype)
        # Frequencies are a table computed at start: the model's dtype is no reason to round them.
        kept = theirs.dtype if kept_wider or kind == "rope-dtype" else None
        wanted = kept or _wanted(golden, candidate, source, theirs.dtype)
        if not is_narrower(held.dtype, wanted) or _holds_the_same(golden, candidate, name, sources):
            continue
        certain = kept_wider and held.lasting and golden.compute == candidate.compute
        yield _finding(kind, name, short(wanted), short(held.dtype), certain, _cost(golden, candidate, name, source))


def _wanted(golden: Contract, candidate: Contract, source: str, theirs: torch.dtype) -> torch.dtype:
    """The narrowest dtype that a tensor in the golden's own dtype may be stored in."""
    return torch.float32 if golden.is_pinned(source) else max(theirs, candidate.compute, key=precision)


def _holds_the_same(golden: Contract, candidate: Contract, name: str, sources: list[str]) -> bool:
    mine, theirs = candidate.values(name), golden.values(sources[0])
    if mine is None or theirs is None or len(sources) > 1 or mine.shape != theirs.shape:
        return False
    return bool(torch.equal(mine.to("cpu", torch.float64), theirs.to("cpu", torch.float64)))


def _cost(golden: Contract, candidate: Contract, name: str, source: str) -> str:
    """What the rounding does, where the values are at hand to tell."""
    mine, theirs = candidate.values(name), golden.values(source)
    if mine is None or theirs is None or mine.shape != theirs.shape:
        return ""
    exact, rounded = theirs.to("cpu", torch.float64), mine.to("cpu", torch.float64)
    if not torch.equal(theirs.to("cpu", mine.dtype).to(torch.float64), rounded):
        # More than rounding happened to it: the comparison of weights says what.
        return ""
    if name.endswith("inv_freq"):
        positions = int(golden.config.get("max_position_embeddings") or 0)
        off = float((exact - rounded).abs().max()) * positions
        return f"; at position {positions} the angle is off by up to {off:.2g}"
    if name.endswith("bias"):
        return f"; {exact.unique().numel()} distinct values become {rounded.unique().numel()}"
    return ""


def _finding(kind: str, name: str, golden: str, candidate: str, certain: bool, cost: str = "") -> LintFinding:
    owner, _, leaf = name.rpartition(".")
    return LintFinding(kind, owner, leaf, golden, candidate, certain, KINDS[kind] + cost)
