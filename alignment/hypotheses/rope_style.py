"""Rotary embedding that pairs the wrong dimensions, turns the wrong way, or misses one of query and key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import parts
from porter.alignment.hypotheses.surgery import names_global, rebind_globals
from porter.alignment.hypotheses.trial import Trial, TrialHypothesis

FUNCTIONS = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")
COMPLEX = "apply_rotary_emb"
"""(query, key, e^(i angle) [B, S, R / 2]): DeepSeek-V2's, which keeps each pair in its place."""
Turn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def turn_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + R/2) of the first R dimensions of `x`, R = cos.shape[-1]; the rest passes through."""
    rotary, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = rotary.chunk(2, dim=-1)
    return torch.cat((rotary * cos + torch.cat((-second, first), dim=-1) * sin, rest), dim=-1)


def turn_interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (2i, 2i + 1) of the first R dimensions of `x`; pairs come out split into halves."""
    rotary, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return turn_half(torch.cat((rotary[..., 0::2], rotary[..., 1::2], rest), dim=-1), cos, sin)


def turn_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (2i, 2i + 1) of the first R dimensions of `x` in place."""
    turned = turn_interleaved(x, cos, sin)
    rotary, rest = turned[..., : cos.shape[-1]], turned[..., cos.shape[-1] :]
    return torch.cat((torch.stack(rotary.chunk(2, dim=-1), dim=-1).flatten(-2), rest), dim=-1)


def turn_pairs_by_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (2i, 2i + 1) in place with angles that lie in halves: each of a pair has one of its own."""
    rotary, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    crossed = torch.stack((-rotary[..., 1::2], rotary[..., 0::2]), dim=-1).flatten(-2)
    return torch.cat((rotary * cos + crossed * sin, rest), dim=-1)


def turn_by_sine(turn: Turn) -> Turn:
    """The same turn with cosines and sines exchanged."""
    return lambda x, cos, sin: turn(x, sin, cos)


def _same(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x


def _rotation(query_turn: Turn, key_turn: Turn, sign: float = 1.0) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def rotate(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sign * sin.unsqueeze(unsqueeze_dim)
        return query_turn(q, cos, sin), key_turn(k, cos, sin)

    return rotate


HALF, PAIRS = "pairs (i, i + R/2), the half style", "pairs (2i, 2i + 1), the interleaved style"


def _on_complex(rotation: Callable[..., Any]) -> Callable[..., Any]:
    """The rotation for angles that are given as complex numbers."""

    def rotate(xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor) -> Any:
        cos, sin = (torch.cat((part, part), dim=-1) for part in (freqs_cis.real, freqs_cis.imag))
        return rotation(xq, xk, cos, sin)

    return rotate


def _variants(own: Turn) -> list[tuple[str, Callable[..., Any]]]:
    """(what the candidate does, the rotation that does it), for a source that turns by `own`."""
    other = turn_interleaved if own is turn_half else turn_half
    own_words, other_words = (HALF, PAIRS) if own is turn_half else (PAIRS, HALF)
    fix = f"the source rotates {own_words}: set that style, or permute the rows of the q and k projections to match"
    return [
        (f"the rotary embedding rotates {other_words}; {fix}", _rotation(other, other)),
        (f"only the query's rotary embedding rotates {other_words}; {fix}", _rotation(other, own)),
        (f"only the key's rotary embedding rotates {other_words}; {fix}", _rotation(own, other)),
        ("the rotary embedding turns backwards: negate sin", _rotation(own, own, -1.0)),
        (
            f"the rotary embedding rotates {PAIRS}, by angles laid out for halves: set the half style",
            _rotation(turn_pairs_by_half, turn_pairs_by_half),
        ),
        (
            "the rotary embedding takes sines for cosines: exchange the two arguments",
            _rotation(turn_by_sine(own), turn_by_sine(own)),
        ),
        ("the rotary embedding is not applied to the query and key", _rotation(_same, _same)),
        ("the rotary embedding is not applied to the key", _rotation(own, _same)),
        ("the rotary embedding is not applied to the query", _rotation(_same, own)),
    ]


def _rebind(path: str, rotation: Callable[..., Any]) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        rebind_globals(module.get_submodule(path), dict.fromkeys(FUNCTIONS, rotation))

    return change


def _rebind_complex(path: str, rotation: Callable[..., Any]) -> Callable[[nn.Module], None]:
    return lambda module: rebind_globals(module.get_submodule(path), {COMPLEX: _on_complex(rotation)})


def _trials(drift: Drift) -> Iterator[Trial]:
    for path, part in parts(drift.source_module, drift.forced):
        if names_global(part, COMPLEX):
            for words, rotation in _variants(turn_pairs):
                says = words[0].upper() + words[1:]
                yield Trial("rope-style", says, _rebind_complex(path, rotation), part=path)
        if not any(names_global(part, name) for name in FUNCTIONS):
            continue
        interleaved = names_global(part, FUNCTIONS[1]) and bool(getattr(part.config, "rope_interleave", True))
        for words, rotation in _variants(turn_interleaved if interleaved else turn_half):
            yield Trial("rope-style", words[0].upper() + words[1:], _rebind(path, rotation), part=path)


HYPOTHESIS = TrialHypothesis(("rope-style",), _trials)
