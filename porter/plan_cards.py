"""Layouts of a port on Ascend cards, judged one by one; the smallest that holds it, and what other schemes take."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from porter.adaptation import Port
from porter.chips.catalogue import Chip
from porter.compressed_keys import has_compressed_keys
from porter.errors import PorterError, Refusal
from porter.models.auto_class import text_config
from porter.parallel_layout import Held, Layout, experts_of, held, local_config, local_model, undividable
from porter.plan import state_bytes
from porter.plan_constraints import Constraint, Subject, constraints
from porter.plan_memory import RESERVE, Load, Stored, Worked, cache, stored, weights_by_kind, workspace
from porter.plan_ops import Observed, observed_calls
from porter.plan_roofline import Card, Roofline, decode_regimes
from porter.plan_schemes import PLANNED, KernelVerdict, Storage, judge, storage_of
from porter.quantization import SCHEMES, scheme_named

MOST_CARDS = 512


@dataclass(frozen=True)
class CardPlan:
    """One layout, judged: what a card holds, what it must meet, and how fast it may be."""

    layout: Layout
    rows: tuple[Stored, ...]
    weights: tuple[Worked, ...]
    cache: tuple[Worked, ...]
    workspace: tuple[Worked, ...]
    constraints: tuple[Constraint, ...]
    roofline: tuple[Roofline, ...]
    memory: int

    @property
    def bytes(self) -> float:
        """Bytes that one card needs."""
        return sum(w.value for w in (*self.weights, self.cache[-1], *self.workspace))

    @property
    def usable(self) -> float:
        """Bytes of a card without the reserve."""
        return self.memory * (1 - RESERVE)

    @property
    def fits(self) -> bool:
        """Whether a card holds its share beside the reserve."""
        return self.bytes <= self.usable

    @property
    def broken(self) -> list[Constraint]:
        """The constraints that the layout does not meet."""
        return [c for c in self.constraints if c.met is False]


@dataclass(frozen=True)
class Alternative:
    """A scheme on this chip: its verdicts, and the fewest cards that hold the model so; None where none up to
    MOST_CARDS do. `converts` is whether porter writes the scheme for this chip today."""

    scheme: str
    says: str
    kernels: tuple[KernelVerdict, ...]
    converts: bool
    cards: int | None
    tp: int | None
    ep: int | None
    weight_bytes: float | None
    tokens_per_second: float | None


class Planner:
    """Plans one port on its chip, over layouts and schemes; keeps what they share."""

    def __init__(self, port: Port, load: Load) -> None:
        """Raises PorterError for caches that plans do not work out."""
        if has_compressed_keys(text_config(port.config)):
            name = port.family.model_type
            raise PorterError(f"{name}: plans for Ascend do not work out caches of compressed keys yet")
        self.port, self.load = port, load
        self.model_class = port.source.model_class()
        self.config = copy.deepcopy(port.config)
        self.config.porter = {**port.config.porter, "quantized": {}}
        self.width = port.dtype.itemsize
        self.whole = self._model(Layout(1, 1))
        self.memory = port.chip.memory_bytes()
        self.experts = bool(experts_of(self.config))
        self._shares: dict[Layout, tuple[tuple[Held, ...], int]] = {}
        self._storages: dict[str, Storage] = {}
        self._calls: dict[tuple[str, Layout], list[Observed]] = {}

    def on(self, chip: Chip) -> Planner:
        """A planner of the same port on another chip, which shares what does not depend on chips."""
        twin = copy.copy(self)
        twin.port, twin.memory = replace(self.port, chip=chip), chip.memory_bytes()
        return twin

    def _model(self, layout: Layout) -> nn.Module:
        return local_model(self.model_class, self.config, layout)

    def _share(self, layout: Layout) -> tuple[tuple[Held, ...], int]:
        if layout not in self._shares:
            local = self._model(layout)
            self._shares[layout] = held(self.whole, local), state_bytes(local, self.width)
        return self._shares[layout]

    def storage(self, name: str) -> Storage:
        """The scheme `name` of this model. Raises PorterError where it does not apply to it."""
        if name not in self._storages:
            self._storages[name] = storage_of(name, self.port.source, self.config)
        return self._storages[name]

    def calls(self, scheme: str, layout: Layout) -> list[Observed]:
        """The Op calls of one card, ported in `scheme`."""
        if (scheme, layout) not in self._calls:
            port = self.port
            found = observed_calls(port.source, self.config, scheme_named(scheme), port.dtype, layout, self.load)
            self._calls[scheme, layout] = found
        return self._calls[scheme, layout]

    def card(self, storage: Storage, layout: Layout) -> CardPlan:
        """The layout, judged. Raises Refusal where it does not divide the model."""
        if faults := undividable(self.config, layout):
            raise Refusal(f"--tp {layout.tp} --ep {layout.ep}: does not divide the model: {'; '.join(faults)}")
        share, state = self._share(layout)
        chip, local, load = self.port.chip, local_config(self.config, layout), self.load
        rows = stored(share, storage, chip)
        subject = Subject(self.config, local, layout, chip, load, rows, storage.name)
        card = Card(self.config, local, layout, chip, rows, state, self.width)
        return CardPlan(
            layout=layout,
            rows=rows,
            weights=weights_by_kind(rows),
            cache=cache(self.config, local, layout, load, state, self.width),
            workspace=workspace(share, self.config, layout, load, chip, self.width),
            constraints=constraints(subject),
            roofline=tuple(decode_regimes(card, load)),
            memory=self.memory or 0,
        )

    def layouts(self) -> Iterator[list[Layout]]:
        """Layouts of 1, 2, 4 ... cards: dense models share every layer, models of experts spread those over all."""
        cards, moe = 1, bool(experts_of(self.config))
        while cards <= MOST_CARDS:
            sizes = [tp for tp in (2**p for p in range(cards.bit_length())) if moe or tp == cards]
            whole = [Layout(tp, cards if moe else 1) for tp in sizes]
            yield [layout for layout in whole if not undividable(self.config, layout)]
            cards *= 2

    def smallest(self, storage: Storage) -> CardPlan | None:
        """Of the fewest cards that hold the model and meet every constraint, the layout that decodes fastest."""
        for choices in self.layouts():
            plans = [
                plan for plan in (self.card(storage, layout) for layout in choices) if plan.fits and not plan.broken
            ]
            if plans:
                return max(plans, key=_decodes)
        return None

    def alternatives(self) -> tuple[Alternative, ...]:
        """Every scheme that applies to the model, on this chip; one that falls back holds its weights in bfloat16."""
        found = []
        for name in (*SCHEMES, *PLANNED):
            try:
                storage = self.storage(name)
            except PorterError:
                continue
            if name == "fp32":
                continue
            plan = self.smallest(storage)
            kernels = judge(storage, self.port.chip, self.experts)
            sizes: tuple[Any, ...] = (None, None, None, None, None)
            if plan is not None:
                layout, weights = plan.layout, sum(w.value for w in plan.weights)
                sizes = (layout.cards, layout.tp, layout.ep, weights, plan.roofline[-2].tokens_per_second)
            native = storage.plain.dtype in self.port.chip.dtypes and all(k.verdict == "native" for k in kernels)
            found.append(Alternative(storage.name, storage.says, kernels, native and name in SCHEMES, *sizes))
        return tuple(found)


def _decodes(plan: CardPlan) -> tuple[float, int]:
    """Ties go to the layout that shares more of each layer, whose first token is sooner."""
    return plan.roofline[-2].tokens_per_second or 0.0, plan.layout.tp
