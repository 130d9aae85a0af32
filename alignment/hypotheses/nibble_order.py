"""Four-bit codes unpacked in another order: the values are all there, moved within the bytes or words they share."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.relation import Finding, Parameter, ParameterHypothesis, relative

PAIR = (1, 0)
WORD_REVERSED = (7, 6, 5, 4, 3, 2, 1, 0)
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
AWQ_BACK = (0, 4, 1, 5, 2, 6, 3, 7)

WITHIN: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("the low and the high nibble of each byte are exchanged", PAIR),
    ("the eight nibbles of each 32-bit word are in reverse order", WORD_REVERSED),
    ("the eight nibbles of each 32-bit word are in AWQ's order, 0 2 4 6 1 3 5 7", AWQ),
    ("the eight nibbles of each 32-bit word are put into AWQ's order, which they are not in", AWQ_BACK),
)
"""Orders within a word; the source's are taken to be consecutive."""


def orders(size: int, dim: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(what it means, order with candidate = source[order]) of the mistakes that fit `size` values along `dim`.

    Rows go from halves to alternating places for other reasons too (rope styles, gate and up): columns alone here.
    """
    index = torch.arange(size)
    for words, within in WITHIN:
        if size % len(within) == 0:
            yield words, (index.view(-1, len(within))[:, list(within)]).reshape(-1)
    for block in (size, 32, 64, 128) if dim == -1 else ():
        if block % 2 == 0 and size % block == 0 and block > 2:
            halves = index.view(-1, 2, block // 2).transpose(1, 2).reshape(-1)
            where = "" if block == size else f" of each {block}"
            yield f"low nibbles are taken for the first half{where} and belong to even places", halves.argsort()
            yield f"low nibbles are taken for even places and belong to the first half{where}", halves


def is_packing(order: torch.Tensor, dim: int) -> bool:
    """Whether a permutation along the dimension `dim` (negative) is one of those that packed codes make."""
    if dim not in (-1, -2):
        return False
    return any(torch.equal(order.cpu(), each) for _, each in orders(len(order), dim))


def _relation(drift: Drift, parameter: Parameter) -> Iterator[Finding]:
    source, candidate = parameter.source, parameter.candidate
    if source.dim() < 2:
        return
    for dim, axis in ((-1, "columns"), (-2, "rows")):
        for words, order in orders(source.shape[dim], dim):
            moved = source.index_select(dim, order.to(source.device))
            says = f"{parameter.name} has its {axis} regrouped as packed codes are: {words}"
            yield Finding("nibble-order", relative(moved, candidate), says)


HYPOTHESIS = ParameterHypothesis(("nibble-order",), _relation)
