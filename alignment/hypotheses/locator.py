"""Where an unexplained error sits, and what the two outputs have in common: words for what no known bug explains."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.permutation import block_of, matching_order
from porter.alignment.hypotheses.trial import joined
from porter.alignment.model_call import CannotRun
from porter.alignment.observation import relative

MOST = 0.9
FEW = 0.25
BLOCK = 128
RANKS = (2, 4, 8)
SMALL = 1e-3
"""A relation holds that leaves less than this share of the error's energy."""


def where(drift: Drift) -> list[str]:
    """What is peculiar about the drift: relations between the two outputs first, then the places of the error."""
    drift = _on_output(drift)
    if not all(drift.tensor in seen for seen in (*drift.source_output[:1], *drift.candidate_output[:1])):
        return []
    candidate, source = joined(drift, drift.candidate_output), joined(drift, drift.source_output)
    if candidate.shape != source.shape:
        return []
    known = [
        *_of_inputs(drift),
        *relations(candidate, source),
        *localise(candidate, source),
        *structured(candidate, source, drift.config),
    ]
    return list(dict.fromkeys([*known, *_steps(drift), *_tail(drift)]))


def _of_inputs(drift: Drift) -> Iterator[str]:
    """The output is an input, or errs for the tokens of some experts alone."""
    given = inputs_of(drift)
    mine = [seen.get("output") for seen in drift.candidate_output]
    firsts = [next((t for t in tensors if t.is_floating_point()), None) for tensors in given]
    if firsts and all(
        a is not None and b is not None and a.numel() == b.numel() and relative(a.reshape(b.shape), b) <= drift.floor
        for a, b in zip(mine, firsts, strict=False)
    ):
        yield "the module returns its input unchanged"
    yield from _experts(drift, given)


def inputs_of(drift: Drift) -> list[list[torch.Tensor]]:
    """The tensors that the module is called with, positional ones first, per step."""
    given: list[list[torch.Tensor]] = []

    def spy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given.append([value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)])
        return args, kwargs

    try:
        drift.run(drift.source_module, spy)
    except CannotRun:
        return []
    return given


def _experts(drift: Drift, given: Sequence[Sequence[torch.Tensor]]) -> Iterator[str]:
    """Experts whose tokens alone err, and all of them; of a module that is told the experts of each token."""
    wrong: set[int] = set()
    right: set[int] = set()
    for tensors, mine, theirs in zip(given, drift.candidate_output, drift.source_output, strict=False):
        chosen = next((t for t in tensors if t.dtype == torch.int64 and t.dim() == 2), None)
        if chosen is None or "output" not in mine or mine["output"].shape != theirs["output"].shape:
            return
        error, size = (mine["output"] - theirs["output"]).norm(dim=-1), theirs["output"].norm(dim=-1)
        bad = (error > drift.floor * size.clamp_min(1e-300)).flatten()
        if bad.numel() != chosen.shape[0]:
            return
        right |= set(chosen[~bad].flatten().tolist())
        wrong |= set(chosen[bad].flatten().tolist())
    blamed = sorted(wrong - right)
    if blamed and right:
        listed = ", ".join(map(str, blamed[:6])) + (", ..." if len(blamed) > 6 else "")
        yield f"only tokens that go to expert {listed} err, and all of these do: look at the weights of that expert"


def _on_output(drift: Drift) -> Drift:
    """The drift as its main output shows it, where that is off too: attention weights say less."""
    found = [
        relative(mine["output"], theirs["output"])
        for mine, theirs in zip(drift.candidate_output, drift.source_output, strict=False)
        if "output" in mine and "output" in theirs
    ]
    return dataclasses.replace(drift, tensor="output") if max(found, default=0.0) > drift.floor else drift


def relations(candidate: torch.Tensor, source: torch.Tensor) -> Iterator[str]:
    """candidate [tokens, features] as a permutation or a rotation of source, by channels or by tokens."""
    for dim, words in ((1, "channels"), (0, "tokens")):
        order = matching_order(source, candidate, dim)
        if order is not None:
            unit = block_of(order)
            blocks = f" in blocks of {unit}" if unit > 1 else ""
            yield f"the {words} are the source's in another order{blocks} (the first is its {int(order[0])})"
            return
    if not bool((candidate.isfinite() & source.isfinite()).all()):
        return
    factors = (source * candidate).sum(-1) / source.square().sum(-1).clamp_min(1e-300)
    left = (candidate - factors[:, None] * source).square().sum()
    if float(left) < SMALL**2 * float((candidate - source).square().sum()):
        low, high = float(factors.min()), float(factors.max())
        yield f"each token is the source's times a factor of its own ({low:.4g} to {high:.4g})"
        return
    yield from _orthogonal(candidate, source)


def _orthogonal(candidate: torch.Tensor, source: torch.Tensor) -> Iterator[str]:
    """candidate = source @ Q with Q orthogonal: every token keeps its length and its angles to the others."""
    tokens = source.shape[0]
    if tokens < 3 or source.shape[1] < 2:
        return
    theirs, mine = source @ source.t(), candidate @ candidate.t()
    if float((mine - theirs).norm()) < SMALL * float(theirs.norm()):
        yield "the channels are the source's rotated (lengths and angles of tokens are kept): a rotation is not undone"


def localise(candidate: torch.Tensor, oracle: torch.Tensor) -> Iterator[str]:
    """What is peculiar about where |candidate - oracle|^2 lies in [..., tokens, features]."""
    if candidate.shape != oracle.shape or candidate.dim() < 2:
        return
    square = _squares(candidate, oracle)
    total = float(square.sum())
    if total == 0.0:
        return
    yield from _range("tokens", square.sum(1) / total)
    yield from _range("channels", square.sum(0) / total)


def structured(candidate: torch.Tensor, source: torch.Tensor, config: Any) -> Iterator[str]:
    """Heads, blocks of 128 channels, and ranks that hold the error alone."""
    square = _squares(candidate, source)
    total, width = float(square.sum()), square.shape[1]
    if total == 0.0:
        return
    by_channel = square.sum(0) / total
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    head_dim = int(getattr(config, "head_dim", 0) or 0)
    if heads > 1 and head_dim and width == heads * head_dim:
        yield from _range("heads", by_channel.view(heads, -1).sum(1), fewest=2)
    if width % BLOCK == 0 and width > BLOCK:
        yield from _range("blocks of 128 channels", by_channel.view(-1, BLOCK).sum(1), fewest=2)
    for ranks in RANKS:
        if width % ranks == 0 and width > ranks:
            shares = by_channel.view(ranks, -1).sum(1)
            if float(shares.max()) > 1 - 1e-9:
                yield f"all of it lies in the channels of rank {int(shares.argmax())} of {ranks}"
                return


def _steps(drift: Drift) -> Iterator[str]:
    """Prefill and decode told apart."""
    seen = [
        float((mine[drift.tensor] - theirs[drift.tensor]).norm() / theirs[drift.tensor].norm().clamp_min(1e-300))
        for mine, theirs in zip(drift.candidate_output, drift.source_output, strict=False)
        if drift.tensor in mine and drift.tensor in theirs and mine[drift.tensor].shape == theirs[drift.tensor].shape
    ]
    if len(seen) > 1 and seen[0] <= drift.floor < max(seen[1:]):
        first = next(index for index, error in enumerate(seen) if error > drift.floor)
        yield f"the prefill agrees, decode steps do not (from step {first} on): look at the cache, mask and positions"
    elif len(seen) > 1 and max(seen[1:]) <= drift.floor < seen[0]:
        yield "decode steps agree, the prefill does not: look at the mask, and at kernels that take many tokens at once"


def _tail(drift: Drift) -> Iterator[str]:
    """The position from which on a prefill [B, S, H] differs."""
    for mine, theirs in zip(drift.candidate_output, drift.source_output, strict=False):
        candidate, source = mine.get(drift.tensor), theirs.get(drift.tensor)
        if candidate is None or source is None or candidate.shape != source.shape or source.dim() != 3:
            continue
        if source.shape[1] < 4:
            continue
        error = (candidate - source).norm(dim=-1).amax(0) / source.norm(dim=-1).amax(0).clamp_min(1e-300)
        over = (error > drift.floor).nonzero().flatten().tolist()
        if over and over[0] > 0 and over == list(range(over[0], source.shape[1])):
            yield f"tokens up to position {over[0] - 1} agree and all from {over[0]} on differ"
        return


def _squares(candidate: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return (candidate - source).nan_to_num(posinf=0.0, neginf=0.0).flatten(0, -2).square()


def _range(what: str, shares: torch.Tensor, fewest: int = 4) -> Iterator[str]:
    """Names the few places that hold most of the error."""
    order = shares.argsort(descending=True)
    needed = int((shares[order].cumsum(0) < MOST).sum()) + 1
    few = max(1, int(FEW * len(shares))) if fewest >= 4 else len(shares) // 2
    if len(shares) < fewest or needed > few:
        return
    places: Sequence[int] = sorted(order[:needed].tolist())
    spans = places[-1] - places[0] + 1 == needed and needed > 1
    listed = (
        f"{places[0]} to {places[-1]}" if spans else ", ".join(map(str, places[:6])) + (", ..." if needed > 6 else "")
    )
    yield f"{100 * MOST:.0f} % of it lies in {needed} of {len(shares)} {what} ({listed})"
