"""Indexers: the keys that each query selected, compared as sets, with the scores that upstream ranked."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from porter.alignment.observation import Observation
from porter.alignment.routing import COMBINE, Choice

OUTRANKED = -1e30
"""The score of the column that stands for hidden keys: far from that of any key, and no infinity to subtract."""


class _Ranked(TorchFunctionMode):
    """Keeps what is ranked by `topk` while the context lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.topk, Tensor.topk) and args:
            self.scores.append(args[0].detach())
        return func(*args, **(kwargs or {}))


@contextmanager
def ranking(module: nn.Module) -> Iterator[list[Tensor]]:
    """What an indexer ranks while the context lasts; of other modules nothing is kept."""
    if not hasattr(module, "index_topk"):
        yield []
        return
    with _Ranked() as ranked:
        yield ranked.scores


def selection_of(
    module: nn.Module, output: Any, args: Sequence[Any], kwargs: Mapping[str, Any], scores: Sequence[Tensor]
) -> tuple[Choice | None, Observation]:
    """The decision in an indexer's output, integers [B, S, K] of T keys, and the keys as a dense [B * S, T] of 0 and 1.

    None for other modules, and where nothing tells which keys are hidden, neither a mask nor the positions of queries
    over compressed keys: these fill the rows of queries that see fewer than K, in any order, and count as one.
    """
    if not isinstance(output, Tensor) or output.is_floating_point() or output.dim() != 3:
        return None, {}
    visible = _visible(module, args, kwargs)
    if visible is None or visible.dim() != 3 or visible.shape[1] != output.shape[1]:
        return None, {}
    keys = visible.shape[-1]
    visible = visible.expand(output.shape[0], -1, -1).reshape(-1, keys)
    chosen = output.reshape(-1, output.shape[-1]).long()
    inside = (chosen >= 0) & (chosen < keys)
    seen = inside & visible.gather(1, chosen.clamp(0, keys - 1))
    chosen = torch.where(seen, chosen, keys)
    choice = Choice(chosen, keys + 1, _ranked(scores, visible))
    return choice, {COMBINE: choice.sets()[:, :keys].to(torch.float32)}


def _visible(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Bool [B or 1, S, T]: the keys that queries may see, by the mask or, where each key stands for `compress_rate`
    tokens, by position: those whose tokens have all been."""
    mask = _argument("attention_mask", module, args, kwargs)
    if mask is not None:
        return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    rate, positions = getattr(module, "compress_rate", None), _argument("position_ids", module, args, kwargs)
    if not isinstance(rate, int) or positions is None or positions.dim() != 2:
        return None
    closed = (positions + 1) // rate
    return torch.arange(int(closed.max()), device=closed.device) < closed.unsqueeze(-1)


def _argument(name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The tensor that the argument of this name is."""
    if isinstance(kwargs.get(name), Tensor):
        return kwargs[name]  # type: ignore[no-any-return]
    names = list(inspect.signature(module.forward).parameters)
    place = names.index(name) if name in names else len(args)
    return args[place] if place < len(args) and isinstance(args[place], Tensor) else None


def _ranked(scores: Sequence[Tensor], visible: Tensor) -> Tensor | None:
    """The scores [B * S, T + 1] with 0 for hidden keys, whose place in the order says nothing."""
    rows = torch.cat([s.reshape(-1, s.shape[-1]) for s in scores]) if scores else None
    if rows is None or rows.shape != visible.shape:
        return None
    rows = rows.masked_fill(~visible, 0.0)
    return torch.cat((rows, rows.new_full((rows.shape[0], 1), OUTRANKED)), dim=1)
