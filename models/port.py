"""Port a model's classes: match, generate, prove, and keep only what the proof passes."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn

from porter.correspondence import Correspondence, Entry
from porter.errors import Refusal
from porter.models.class_source import SourceMismatch
from porter.models.generated import import_text
from porter.models.modelling_source import ported_text
from porter.models.proof import BOUND, Proof, module_error, one_thread, prove_model, record_calls
from porter.models.reduce import randomise, reduced_config
from porter.models.rewrite import Candidate, Mismatch
from porter.models.rewrites import REWRITES


@dataclass(frozen=True)
class PortedClass:
    """An upstream class, the candidate that replaces it, and the error of its own proof."""

    name: str
    candidate: Candidate
    error: float


@dataclass(frozen=True)
class PortedSource:
    """A generated modelling file with the proof behind it."""

    module: str
    class_name: str
    chip: str
    text: str
    classes: tuple[PortedClass, ...]
    near_misses: Mapping[str, str]
    proof: Proof

    @property
    def file_name(self) -> str:
        """modeling_<family>_<chip>.py, with the chip's dashes as underscores."""
        return f"{self.module.rsplit('.', 1)[1]}_{self.chip.replace('-', '_')}.py"

    def load(self) -> ModuleType:
        """The generated module, imported."""
        return import_text(self.text, self.file_name.removesuffix(".py"))

    def model_class(self) -> type[nn.Module]:
        """The ported causal language model class."""
        return getattr(self.load(), self.class_name)  # type: ignore[no-any-return]


@dataclass
class _Search:
    """Candidates left to try for each upstream class."""

    waiting: dict[str, list[Candidate]] = field(default_factory=dict)
    instance: dict[str, str] = field(default_factory=dict)
    near_misses: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def chosen(self) -> dict[str, Candidate]:
        return {name: candidates[0] for name, candidates in self.waiting.items()}

    def reject(self, name: str, reason: str) -> None:
        del self.waiting[name][0]
        if not self.waiting[name]:
            del self.waiting[name]
            self.near_misses[name] = reason


def port_source(config: Any, module: str, class_name: str, chip: str) -> PortedSource:
    """Port the classes of upstream `module` for models of `config`, proven at reduced width in float64.

    Raises Refusal naming the part of the proof that fails when the whole model does not agree although its parts do.
    """
    with one_thread():
        return _port_source(config, module, class_name, chip)


def _port_source(config: Any, module: str, class_name: str, chip: str) -> PortedSource:
    upstream = importlib.import_module(module)
    small = reduced_config(config)
    source = randomise(getattr(upstream, class_name)(small).double())
    calls = record_calls(source)
    search = _match(source, module)
    while True:
        text, ported = _generate(search, module, class_name, chip, small, source)
        failing = _failing(search, ported, calls)
        if not failing:
            break
        for name, error in failing.items():
            variant = search.waiting[name][0].variant
            search.reject(name, f"{variant}: float64 proof gives relative error {error:.1e}, the bound is {BOUND:.0e}")
    proof = prove_model(source, ported)
    if not proof.passed:
        part, error = max(proof.errors.items(), key=lambda item: item[1])
        raise Refusal(
            f"{class_name}: the ported model differs from upstream in {part} by {error:.1e} (bound {BOUND:.0e})"
        )
    classes = tuple(PortedClass(n, c, search.errors[n]) for n, c in search.chosen().items())
    return PortedSource(module, class_name, chip, text, classes, dict(search.near_misses), proof)


def _match(source: nn.Module, module: str) -> _Search:
    """Ask every rewrite about every class of the upstream file that the model uses."""
    search = _Search()
    for name, part in source.named_modules():
        kind = type(part).__name__
        if type(part).__module__ != module or kind in search.instance:
            continue
        for rewrite in REWRITES:
            found = rewrite.candidates(part)
            if isinstance(found, Mismatch):
                search.near_misses[kind] = f"{rewrite.name}: {found.reason}"
            elif found:
                search.waiting[kind], search.instance[kind] = found, name
                search.near_misses.pop(kind, None)
                break
    return search


def _generate(
    search: _Search, module: str, class_name: str, chip: str, config: Any, source: nn.Module
) -> tuple[str, nn.Module]:
    """The text with the current candidates, and the ported model at reduced width with the source's weights."""
    while True:
        _drop_unsupported(search, source)
        try:
            text = ported_text(module, search.chosen(), chip)
            break
        except SourceMismatch as error:
            search.reject(error.class_name, str(error))
    loaded = import_text(text, f"{module.rsplit('.', 1)[1]}_{chip.replace('-', '_')}")
    ported = getattr(loaded, class_name)(config).double()
    ported.load_state_dict(correspondence_of(source, search.chosen()).convert(source.state_dict()))
    return text, ported


def _drop_unsupported(search: _Search, source: nn.Module) -> None:
    """A candidate that calls a child in its ported form needs that child to be ported."""
    for name, candidate in search.chosen().items():
        children = dict(source.get_submodule(search.instance[name]).named_children())
        for needed in candidate.needs_ported:
            if type(children[needed]).__name__ not in search.waiting:
                search.reject(name, f"{candidate.rewrite}: its {needed} was not ported")
                break


def _failing(search: _Search, ported: nn.Module, calls: Mapping[str, Any]) -> dict[str, float]:
    """The classes whose instances miss the bound, innermost first: a container is judged once its parts are right."""
    failing: dict[str, float] = {}
    for kind, name in sorted(search.instance.items(), key=lambda item: -item[1].count(".")):
        if kind not in search.waiting:
            continue
        search.errors[kind] = error = module_error(ported.get_submodule(name), calls[name])
        if not error <= BOUND and not any(search.instance[f].startswith(f"{name}.") for f in failing):
            failing[kind] = error
    return failing


def correspondence_of(source: nn.Module, chosen: Mapping[str, Candidate]) -> Correspondence:
    """The entries of every instance of the chosen classes within `source` (which may be on the meta device)."""
    entries = []
    for name, part in source.named_modules():
        candidate = chosen.get(type(part).__name__)
        for fusion in candidate.fusions if candidate else ():
            sources = tuple(f"{name}.{s}" for s in fusion.sources)
            sizes = tuple(int(part.get_submodule(s).out_features) for s in fusion.sources)
            entries.append(Entry(f"{name}.{fusion.target}", sources, sizes))
    return Correspondence(tuple(entries))


def source_on_meta(config: Any, module: str, class_name: str) -> nn.Module:
    """The upstream model of `config` without storage; building one writes into its config, so it gets a copy."""
    with torch.device("meta"):
        return getattr(importlib.import_module(module), class_name)(copy.deepcopy(config))  # type: ignore[no-any-return]
