"""What a case is: a planted fault, or a legitimate difference, in one family's candidate."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.drift.families import FAMILIES, Family
from benchmarks.drift.site import Site

Plant = Callable[[Site], str | tuple[str, ...]]
"""Plants at a site and returns the module that is then at fault (several where they are one place to a reader)."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PAIRS = ("fp32-fp32", "fp32-bf16", "bf16-bf16")
"""Dtype of the golden, dtype of the candidate."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault, planted in one or more families.

    `kinds`: the right causes; more than one where the data cannot tell them apart. `layers`: all | sparse | dense |
    linear | full | sliding, the layers that it may be planted in. `scope`: one layer, or every such layer. `golden`:
    "" or the golden's variant (blocks: fp8 blocks; int4: grouped with zero points; padded: rows of unequal lengths;
    long: 96 tokens).
    """

    id: str
    kinds: tuple[str, ...]
    families: tuple[str, ...]
    plant: Plant
    scope: str = "one"
    layers: str = "all"
    pairs: tuple[str, ...] = PAIRS
    golden: str = ""
    form: str = ""
    second: Fault | None = None


@dataclass(frozen=True)
class Case:
    """One golden and one candidate. `fault` None: a legitimate difference, made by `plant` where there is one."""

    id: str
    seed: int
    family: Family
    pair: str
    golden: str = ""
    form: str = ""
    fault: Fault | None = None
    plant: Plant | None = None
    attention: str = "eager"
    experts: str = ""
    recorded: str = ""

    @property
    def golden_dtype(self) -> torch.dtype:
        """The golden's."""
        return DTYPES[self.pair.split("-")[0]]

    @property
    def candidate_dtype(self) -> torch.dtype:
        """The candidate's."""
        return DTYPES[self.pair.split("-")[1]]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The right causes, of both faults where there are two."""
        if self.fault is None:
            return ()
        return self.fault.kinds + (self.fault.second.kinds if self.fault.second else ())


@dataclass(frozen=True)
class Expectation:
    """Where the planted faults are: modules in the order that they run, and the ones that count as found."""

    modules: tuple[tuple[str, ...], ...] = field(default_factory=tuple)

    @property
    def first(self) -> tuple[str, ...]:
        """Names that are right for the first."""
        return self.modules[0]


def fault_cases(faults: Sequence[Fault], seed: int) -> Iterator[Case]:
    """One case per fault and family; the dtypes are drawn by the seed."""
    for fault in faults:
        for name in fault.families:
            own = zlib.crc32(f"{fault.id}/{name}".encode()) + seed
            pair = random.Random(own).choice(fault.pairs)
            yield Case(f"{fault.id}/{name}", own, FAMILIES[name], pair, fault.golden, fault.form, fault)


def layers_of(fault: Fault, family: Family, config: object) -> list[int]:
    """The layers that the fault may be planted in."""
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * family.layers)
    choices = {
        "all": range(family.layers),
        "sparse": family.sparse,
        "dense": [layer for layer in range(family.layers) if layer not in family.sparse],
        "linear": [layer for layer, kind in enumerate(kinds) if kind == "linear_attention"],
        "full": [layer for layer, kind in enumerate(kinds) if kind == "full_attention"],
        "attention": [layer for layer, kind in enumerate(kinds) if kind != "linear_attention"],
        "sliding": [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"],
    }
    return list(choices[fault.layers])


def plant(fault: Fault, model: object, case: Case, stored: dict[str, tuple[torch.Tensor, ...]]) -> Expectation:
    """Plant a case's fault, and its second where it has one."""
    source = random.Random(case.seed)
    found: list[tuple[str, ...]] = []
    for each in (fault, fault.second):
        if each is None:
            continue
        layers = layers_of(each, case.family, model.config)  # type: ignore[attr-defined]
        chosen = layers if each.scope == "all" else [source.choice(layers)]
        for layer in chosen:
            names = each.plant(Site(model, case.family, layer, source, stored))
            found.append((names,) if isinstance(names, str) else names)
    order = {name: index for index, name in enumerate(execution(model))}
    return Expectation(tuple(sorted(found, key=lambda names: min(order.get(name, 0) for name in names))))


def execution(model: Any) -> list[str]:
    """The names of the modules in the order that they finish: a parent after its children, a norm where it is called
    and not where it is defined."""
    order: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: order.append(name)) for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return list(dict.fromkeys(order))
