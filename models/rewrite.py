"""What a rewrite proposes: a ported class body for one upstream class, to be proven before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn


@dataclass(frozen=True)
class Fusion:
    """Linears read as one: `self.<target>` replaces `self.<sources>`, rows in that order.

    `sizes` names an attribute that holds the rows of each source, for splitting the output.
    """

    target: str
    sources: tuple[str, ...]
    sizes: str | None = None


@dataclass(frozen=True)
class Adopted:
    """A forward whose upstream signature is kept: `prologue` names its arguments as the ported body does, and `returns`
    is how many values it returns (the second is the attention weights, which are not computed; the third the cache)."""

    prologue: tuple[str, ...]
    returns: int


@dataclass(frozen=True)
class Candidate:
    """One way to port an upstream class: what its `__init__` loses and gains, and its new forward.

    `rename` maps the attributes that `forward` reads to upstream's names for them. `append` are lines for the end of
    `__init__`, `drop` are methods to remove. `keep_linear` names linears that stay torch's, since an Op reads their
    weight; `needs_ported` names children that `forward` calls in their ported form. Methods beside `forward` of its
    class are added.
    """

    rewrite: str
    forward: type[nn.Module]
    variant: str
    rename: Mapping[str, str] = field(default_factory=dict)
    fusions: tuple[Fusion, ...] = ()
    append: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    keep_linear: tuple[str, ...] = ()
    needs_ported: tuple[str, ...] = ()
    adopt: Adopted | None = None


@dataclass(frozen=True)
class Mismatch:
    """A near miss: the module looked like the rewrite's pattern but differs in the way that `reason` says."""

    reason: str


def attribute_named(module: nn.Module, names: tuple[str, ...], *kinds: type) -> str | None:
    """The first of `names` under which `module` has a value of exactly one of `kinds`; None where it has none."""
    return next((n for n in names if type(getattr(module, n, None)) in kinds), None)


class Rewrite(Protocol):
    """A structural match on the source model; candidates are tried in order until one passes its float64 proof."""

    name: str

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """Candidates for `module`'s class, a near miss with its reason, or None when it is something else."""
