"""Regimes: the lengths, modes, positions and batches in which a candidate may fail though it passes in others."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from porter.alignment.calls import new_cache
from porter.alignment.model_call import called
from porter.models.cache_argument import CACHE_NAMES, cache_keyword

LONGEST = 4097
"""One past 4096, the largest power of two that a sweep asks for."""

SMALLEST_POWER = 64
CHUNKS = 3
DECODED = 2
"""Decode steps at the end of a sequence: the second reads what the first wrote."""

SEED = 20

Step = dict[str, Tensor]


@dataclass(frozen=True)
class Regime:
    """One way of running a model.

    `length`: tokens that the longest row holds in the end. `mode`: "prefill" runs them at once, without a cache;
    "decode" all but the last two at once and those one by one; "chunked" in three chunks. `offset`: position of the
    first token. `batch`: rows. `padding`: "none", or the side on which the shorter rows of the batch are padded.
    `tokens`: "mixed", or "same" for one token repeated, which sends every token to the same experts.
    """

    length: int
    mode: str = "prefill"
    offset: int = 0
    batch: int = 1
    padding: str = "none"
    tokens: str = "mixed"

    @property
    def shortest(self) -> int:
        """The smallest length at which this kind of regime exists."""
        least = {"prefill": 1, "decode": 2, "chunked": 4}[self.mode]
        return least + 1 if self.padding != "none" else least

    def at(self, length: int) -> Regime:
        """The same regime at another length."""
        return replace(self, length=length)

    def simpler(self) -> Iterator[Regime]:
        """Regimes that differ from this one in one respect, each the simpler way; a single row also as long as all rows
        together, for what depends on the number of tokens."""
        if self.tokens != "mixed":
            yield replace(self, tokens="mixed")
        if self.padding != "none":
            yield replace(self, padding="none")
            if self.batch > 2:
                yield replace(self, batch=2)
        elif self.batch > 1:
            yield replace(self, batch=1)
            yield replace(self, batch=1, length=self.batch * self.length)
        if self.offset:
            yield replace(self, offset=0)
        if self.mode != "prefill":
            yield replace(self, mode="prefill")

    def unlike(self, other: Regime) -> str:
        """In what `other`, one of the `simpler` regimes, differs, in words."""
        if other.tokens != self.tokens:
            return "with mixed tokens"
        if other.padding != self.padding:
            return "without padding"
        if other.batch != self.batch:
            return f"at batch {other.batch}"
        return "without offset" if other.offset != self.offset else "in one prefill"

    def aspects(self) -> list[str]:
        """What a person is told besides the length: the mode, and what is out of the ordinary."""
        return [
            {"prefill": "prefill", "decode": "decode", "chunked": "chunked prefill"}[self.mode],
            *([f"position offset {self.offset}"] if self.offset else []),
            *([f"batch {self.batch}"] if self.batch > 1 else []),
            *([f"{self.padding}-padded"] if self.padding != "none" else []),
            *(["the same token repeated"] if self.tokens == "same" else []),
        ]

    def says(self) -> str:
        """The regime in words."""
        return ", ".join([f"sequence length {self.length}", *self.aspects()])

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data."""
        return asdict(self)

    @property
    def row_lengths(self) -> list[int]:
        """Tokens of each row once the first call is done; padding fills the rest."""
        first = self.chunk_ends[0] if self.mode == "decode" else self.length
        if self.padding == "none":
            return [first] * self.batch
        return [max(1, first - row * max(1, first // CHUNKS)) for row in range(self.batch)]

    @property
    def chunk_ends(self) -> list[int]:
        """How many tokens are in the cache after each call."""
        if self.mode == "decode":
            steps = min(DECODED, self.length - self.shortest + 1)
            return list(range(self.length - steps, self.length + 1))
        if self.mode == "chunked":
            width = max(2, -(-self.length // CHUNKS))
            return [*range(width, self.length, width), self.length]
        return [self.length]


def kinds(far: int, routed: bool) -> list[Regime]:
    """Every kind of regime that is swept, simplest first, at length 1; `far` is the last position that the model has.

    Chunked prefill is unpadded: which rows of a later chunk are padding is not recorded.
    """
    one = Regime(1)
    found = [
        one,
        replace(one, mode="decode"),
        replace(one, mode="chunked"),
        replace(one, batch=3),
        replace(one, batch=3, padding="left"),
        replace(one, batch=3, padding="right"),
        replace(one, mode="decode", batch=3, padding="left"),
        replace(one, mode="decode", batch=3, padding="right"),
        replace(one, offset=far),
        replace(one, mode="decode", offset=far),
    ]
    if routed:
        found += [replace(one, tokens="same"), replace(one, mode="decode", tokens="same")]
    return found


def fitted(kind: Regime, length: int, far: int) -> Regime | None:
    """`kind` at `length`, its offset cut so that position `far` is the last; None where the length is too short."""
    if length < kind.shortest:
        return None
    offset = min(kind.offset, far + 1 - length)
    return None if kind.offset and offset <= 0 else replace(kind, length=length, offset=max(0, offset))


def lengths(longest: int) -> list[int]:
    """1, 2, then each power of two from 64 with its neighbours, up to `longest`, which is always among them."""
    around = [SMALLEST_POWER << power for power in range(LONGEST.bit_length() - SMALLEST_POWER.bit_length() + 1)]
    grid = {1, 2, 4, *(power + beside for power in around for beside in (-1, 0, 1)), longest}
    return sorted(length for length in grid if length <= longest)


def text(vocabulary: int, rows: int, longest: int) -> Tensor:
    """Token ids [rows, longest], int64, the same on every machine; shorter regimes use the beginning of each row."""
    return torch.randint(0, vocabulary, (rows, longest), generator=torch.Generator().manual_seed(SEED))


def steps(regime: Regime, tokens: Tensor) -> list[Step]:
    """The calls of the regime: input_ids, and where they are not the model's own choice attention_mask and
    position_ids, all int64."""
    rows = tokens[: regime.batch, : regime.length]
    if regime.tokens == "same":
        rows = tokens[:1, :1].expand(regime.batch, regime.length)
    filled, mask = _padded(regime, rows)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0) + regime.offset
    found, start = [], 0
    for end in regime.chunk_ends:
        step = {"input_ids": filled[:, start:end].contiguous()}
        if regime.padding != "none":
            step["attention_mask"] = mask[:, :end].contiguous()
        if regime.padding != "none" or regime.offset:
            step["position_ids"] = positions[:, start:end].contiguous()
        found.append(step)
        start = end
    return found


def _padded(regime: Regime, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The rows with padding in what the first call takes, and their mask; both [batch, length]."""
    filled, mask = torch.zeros_like(rows), torch.ones_like(rows)
    first = max(regime.row_lengths)
    for row, held in enumerate(regime.row_lengths):
        gap = slice(0, first - held) if regime.padding == "left" else slice(held, first)
        mask[row, gap] = 0
        filled[row, mask[row].bool()] = rows[row, : int(mask[row].sum())]
    return filled, mask


def run_steps(model: nn.Module, calls: Sequence[Step]) -> None:
    """Call `model` step after step, with one cache where there are several. Raises CannotRun."""
    parameters = inspect.signature(model.forward).parameters
    parameter = next(model.parameters())
    extra: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
    if len(calls) > 1:
        name = cache_keyword(model) or CACHE_NAMES[0]
        extra = {name: new_cache(getattr(model, "config", None)), "use_cache": True}
    with torch.no_grad():
        for step in calls:
            called(model, **{name: tensor.to(parameter.device) for name, tensor in step.items()}, **extra)
