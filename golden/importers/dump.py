"""What a reader of dumps gives: module calls in order, values in files, values of which statistics are left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from porter.errors import PorterError
from porter.models.cache_argument import CACHE_NAMES

CACHES = (*CACHE_NAMES, "past_key_value")
"""What transformers' modules call the argument that is a key-value cache."""


class CacheSeen:
    """Stands for a key-value cache among the arguments: no tool dumps its content."""


CACHE = CacheSeen()


@dataclass(frozen=True)
class Unknown:
    """An argument of which the dump holds only this text."""

    text: str


@dataclass(frozen=True)
class Measured:
    """A tensor whose elements are not in the dump. ``stats`` as `porter.golden.statistics.statistics` gives them."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stats: dict[str, Any]


@dataclass(frozen=True)
class Held:
    """A tensor whose elements are in the dump: ``read`` gets them and refuses what is not as described."""

    read: Callable[[], Tensor]
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class Call:
    """One call of a module, in the order of returning. Values are tensors, the classes above, or plain Python."""

    module: str
    kind: str | None
    args: list[Any]
    kwargs: dict[str, Any]
    output: Any


@dataclass
class Step:
    """One forward of the whole model; facts of it where the calls do not hold them themselves."""

    calls: list[Call]
    tokens: list[list[int]] | None = None
    attention_mask: list[list[int]] | None = None
    generated: list[int] | None = None
    begin: int | None = None
    """The least position."""


@dataclass(frozen=True)
class Missing:
    """Something that a golden has and the dump lacks, and why."""

    what: str
    why: str


@dataclass
class Dump:
    """A dump that was opened: nothing but its descriptions is in memory until ``steps`` is run through.

    ``full``: tensors were dumped whole. ``root``: the class name of the model, where the tool wrote it. ``parameters``:
    weights that were dumped along, by name. ``lost``: per module, why none of its calls is there.

    """

    tool: str
    full: bool
    dtype: torch.dtype | None
    steps: Callable[[], Iterator[Step]]
    root: str | None = None
    missing: list[Missing] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, Held] = field(default_factory=dict)


def dtype_named(name: str, where: str) -> torch.dtype:
    """``torch.bfloat16`` for its name with or without ``torch.``; PorterError naming ``where`` for anything else."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise PorterError(f"{where}: dtype is {name!r}, which torch {torch.__version__} does not have; dump it again")
    return dtype


def leaves(value: Any) -> Iterator[Any]:
    """Everything inside lists, tuples and dicts, in order."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    else:
        yield value


def most_common_dtype(values: Iterator[Any]) -> torch.dtype | None:
    """The floating dtype that most tensors have."""
    counts: dict[torch.dtype, int] = {}
    for leaf in values:
        if isinstance(leaf, Held | Measured) and leaf.dtype.is_floating_point:
            counts[leaf.dtype] = counts.get(leaf.dtype, 0) + 1
    return max(counts, key=lambda dtype: counts[dtype]) if counts else None
