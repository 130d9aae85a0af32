"""The Op calls of one card at its real widths, and the vendor's operators that each becomes, or why it does not.

The card's share of the model runs on the meta device with two layers of each kind: a prompt, and a step of decoding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from porter.chips.catalogue import Chip
from porter.kernels.ascend.catalogue.vendor_op import described
from porter.kernels.ascend.dry_run import signature
from porter.kernels.ascend.provider import AscendProvider
from porter.kernels.dispatch import OpCall
from porter.models.auto_class import text_config
from porter.models.cache_argument import cache_keyword
from porter.models.port import PortedSource
from porter.parallel_layout import Layout, local_model
from porter.plan import is_scale
from porter.plan_memory import Load
from porter.quantization import Scheme
from porter.quantized_modules import quantized_modules

PER_KIND = 2
"""Layers of each kind that run."""


@dataclass(frozen=True)
class Observed:
    """One call of an Op: where, in which regime, with which arguments, their tensors on the meta device."""

    site: str
    op: str
    variant: str
    regime: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class OpOnChip:
    """One Op with arguments of one shape: the vendor's operators in order, or the reason why the reference serves it.

    `sites` is how many places of the layers that ran call it so, `first` one of them, `arguments` the tensors' shapes.
    """

    op: str
    variant: str
    regime: str
    arguments: str
    calls: tuple[str, ...]
    refused: str | None
    first: str
    sites: int


class Observer(OpCall):
    """An OpCall that notes the arguments of its calls in `seen` while it has a `regime`."""

    def __init__(self, call: OpCall, site: str, seen: list[Observed]) -> None:
        super().__init__(call.name, call.variant, call.registry)
        self.site, self.seen, self.regime = site, seen, ""

    def __call__(self, *arguments: Any) -> Any:
        """The Op's outputs."""
        if self.regime:
            self.seen.append(Observed(self.site, self.name, self.variant, self.regime, arguments))
        return super().__call__(*arguments)


def observe(model: nn.Module, seen: list[Observed]) -> list[Observer]:
    """Put an Observer in the place of every OpCall that a module of `model` holds; the model keeps them."""
    observers = []
    for path, module in model.named_modules():
        for attribute, value in list(vars(module).items()):
            if isinstance(value, OpCall):
                observer = Observer(value, f"{path}.{attribute}" if path else attribute, seen)
                setattr(module, attribute, observer)
                observers.append(observer)
    return observers


def shallow_config(config: Any, layers: int = PER_KIND) -> Any:
    """`config` with the first `layers` layers of each kind: kinds are entries of the lists with one per layer, and
    whether a layer is before `first_k_dense_replace`."""
    shallow = copy.deepcopy(config)
    text = text_config(shallow)
    count = int(text.num_hidden_layers)
    lists = {
        n: v for n, v in text.to_dict().items() if n.endswith("_types") and isinstance(v, list) and len(v) == count
    }
    dense = getattr(text, "first_k_dense_replace", None)
    kinds = [(*(values[i] for values in lists.values()), dense is not None and i < dense) for i in range(count)]
    chosen = [i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < layers]
    for name, values in lists.items():
        setattr(text, name, [values[i] for i in chosen])
    if dense is not None:
        text.first_k_dense_replace = sum(i < dense for i in chosen)
    text.num_hidden_layers = len(chosen)
    if getattr(text, "max_window_layers", None) is not None:
        text.max_window_layers = len(chosen)
    return shallow


def observed_calls(
    source: PortedSource, config: Any, scheme: Scheme, dtype: torch.dtype, layout: Layout, load: Load
) -> list[Observed]:
    """Every Op call of a prompt of `load.context` tokens, and of a step that follows for the card's sequences."""
    shallow = shallow_config(config)
    shallow.porter = {**(getattr(config, "porter", None) or {}), "quantized": {}}
    if scheme.weight_dtype != dtype:
        shallow.porter["quantized"] = quantized_modules(source, shallow, scheme)
    model: Any = local_model(source.model_class(), shallow, layout).eval()
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not is_scale(name):
            parameter.data = parameter.data.to(dtype)
    seen: list[Observed] = []
    observers = observe(model, seen)
    with torch.no_grad():
        with _regime(observers, "prefill"):
            _forward(model, 1, load.context, DynamicCache(config=model.config))
        sequences, cache = load.sequences(layout), DynamicCache(config=model.config)
        _forward(model, sequences, load.context, cache)
        with _regime(observers, "decode"):
            _forward(model, sequences, 1, cache)
    return seen


def _forward(model: Any, batch: int, length: int, cache: DynamicCache) -> None:
    tokens = torch.zeros(batch, length, dtype=torch.int64, device="meta")
    model(input_ids=tokens, use_cache=True, logits_to_keep=1, **{cache_keyword(model): cache})


@contextmanager
def _regime(observers: list[Observer], name: str) -> Iterator[None]:
    for observer in observers:
        observer.regime = name
    yield
    for observer in observers:
        observer.regime = ""


def ops_on_chip(calls: list[Observed], chip: Chip) -> tuple[OpOnChip, ...]:
    """Each distinct call, Op by Op, with what the Ascend provider makes of it on `chip`."""
    groups: dict[tuple[Any, ...], list[Observed]] = {}
    for call in calls:
        key = call.op, call.variant, call.regime, signature(call.arguments)
        groups.setdefault(key, []).append(call)
    provider, result = AscendProvider(), []
    for (op, variant, regime, _), alike in groups.items():
        refused, made = provider.calls(op, variant, chip.name, alike[0].arguments)
        shapes = ", ".join(described(a) for a in alike[0].arguments if isinstance(a, torch.Tensor))
        names = tuple(call.op.name for call in made)
        result.append(OpOnChip(op, variant, regime, shapes, names, refused, alike[0].site, len(alike)))
    return tuple(sorted(result, key=lambda r: (r.op, r.variant, r.regime != "prefill")))
