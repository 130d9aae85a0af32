"""Find the classes of a model that can be ported: match them, generate the file, and drop what its proof rejects."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from porter.correspondence import Correspondence, Entry
from porter.errors import Refusal
from porter.models.class_source import SourceMismatch
from porter.models.generated import import_text, own_package
from porter.models.modelling_source import ported_text
from porter.models.proof import BOUND, Call, Proof, module_verdict, prove_model, record_calls
from porter.models.reduce import randomise, reduced_config
from porter.models.rewrite import Candidate, Mismatch, Rewrite
from porter.models.unseen import hidden_limit

UNKNOWN = "no rewrite knows it"
UNUSED = "a model of this configuration has none"
LIBRARIES = ("torch.", "transformers.activations")
"""Where the plain layers come from that models are made of."""


@dataclass
class Search:
    """The candidates left for each upstream class of one model at reduced width, and why others were dropped.

    `waiting` holds each class's candidates, the current one first; `instances` the modules of each class; `errors`
    the largest error of a class's module proofs.
    """

    module: str
    class_name: str
    chip: str
    config: Any
    source: nn.Module
    calls: Mapping[str, Call]
    waiting: dict[str, list[Candidate]] = field(default_factory=dict)
    instances: dict[str, list[str]] = field(default_factory=dict)
    near_misses: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    nearest: dict[str, tuple[float, str]] = field(default_factory=dict)

    @classmethod
    def begin(
        cls, config: Any, module: str, class_name: str, chip: str, rewrites: Sequence[Rewrite], seed: int = 0
    ) -> Search:
        """Build upstream's model of `config` at reduced width, run it once, and ask every rewrite about its classes."""
        small = reduced_config(config)
        source = randomise(getattr(importlib.import_module(module), class_name)(small).double(), seed)
        search = cls(module, class_name, chip, small, source, record_calls(source))
        search._match(rewrites)
        return search

    def left(self) -> dict[str, str]:
        """Every module class of the file that is not ported, and those of other files that the model is made of, with
        the reason of each."""
        defined = {
            name: kind
            for name, kind in vars(importlib.import_module(self.module)).items()
            if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == self.module
        }
        reasons = {name: UNKNOWN if name in self.instances else UNUSED for name in defined if name not in self.waiting}
        for part in self.source.modules():
            home = type(part).__module__
            if home != self.module and not home.startswith(LIBRARIES):
                reasons[type(part).__name__] = f"defined in {home}, not in the model's own file"
        return reasons | self.near_misses

    def chosen(self) -> dict[str, Candidate]:
        """The current candidate of each class that has one left."""
        return {name: candidates[0] for name, candidates in self.waiting.items()}

    def reject(self, name: str, reason: str, error: float = math.inf) -> None:
        """Drop the current candidate of class `name`; where it was the last, the reason of the one that came closest
        (by its `error`) is kept."""
        del self.waiting[name][0]
        nearest = min(self.nearest.get(name, (math.inf, reason)), (error, reason), key=lambda miss: miss[0])
        self.nearest[name] = nearest
        if not self.waiting[name]:
            del self.waiting[name]
            self.near_misses[name] = nearest[1]

    def settle(self) -> tuple[str, nn.Module, Proof]:
        """The text, the ported model and the whole model's proof once every class in it has passed its own.

        Raises Refusal naming the part that differs when the whole model does not agree although no single class is to
        blame.
        """
        while True:
            text, ported = self._proven_classes()
            proof = prove_model(self.source, ported)
            if proof.passed:
                return text, ported, proof
            self._reject_one(proof)

    def _match(self, rewrites: Sequence[Rewrite]) -> None:
        for name, part in self.source.named_modules():
            if type(part).__module__ == self.module:
                self.instances.setdefault(type(part).__name__, []).append(name)
        for kind, names in self.instances.items():
            parts = [self.source.get_submodule(name) for name in names]
            for rewrite in rewrites:
                found = _common_candidates(rewrite, parts)
                if isinstance(found, Mismatch):
                    self.near_misses[kind] = f"{rewrite.name}: {found.reason}"
                elif found and not any(name in self.calls for name in names):
                    self.near_misses[kind] = f"{rewrite.name}: no forward pass calls it, so nothing can be proven"
                elif found and (limit := _hidden_limit(found, parts)):
                    self.near_misses[kind] = f"{rewrite.name}: {limit}"
                elif found:
                    self.waiting[kind] = found
                    self.near_misses.pop(kind, None)
                    break

    def _proven_classes(self) -> tuple[str, nn.Module]:
        while True:
            text, ported = self._generate()
            failing = self._failing(ported)
            if not failing:
                return text, ported
            for name, reason in failing.items():
                self.reject(name, f"{self.waiting[name][0].variant}: {reason}", self.errors[name])

    def _generate(self) -> tuple[str, nn.Module]:
        """The text with the current candidates, and the ported model at reduced width with the source's weights."""
        while True:
            self._drop_unsupported()
            try:
                text = ported_text(self.module, self.chosen(), self.chip, self.class_name, self._parts())
                break
            except SourceMismatch as error:
                self.reject(error.class_name, str(error))
        name = f"{self.module.rsplit('.', 1)[1]}_{self.chip.replace('-', '_')}"
        loaded = import_text(text, name, own_package(self.module))
        ported: nn.Module = getattr(loaded, self.class_name)(self.config).double()
        ported.load_state_dict(correspondence_of(self.source, self.chosen()).convert(self.source.state_dict()))
        return text, ported

    def _parts(self) -> dict[tuple[str, str], str]:
        """(class, attribute) -> class, for the parts of the model that are built by classes of its own file."""
        own = [part for part in self.source.modules() if type(part).__module__ == self.module]
        return {
            (type(part).__name__, name): type(child).__name__
            for part in own
            for name, child in part.named_children()
            if type(child).__module__ == self.module
        }

    def _drop_unsupported(self) -> None:
        """A candidate that calls a child in its ported form needs that child to be ported."""
        for name, candidate in self.chosen().items():
            for needed in candidate.needs_ported:
                child = self.source.get_submodule(f"{self.instances[name][0]}.{needed}")
                if type(child).__name__ not in self.waiting:
                    self.reject(name, f"{candidate.rewrite}: its {needed} was not ported")
                    break

    def _failing(self, ported: nn.Module) -> dict[str, str]:
        """The classes whose instances miss the bound and how, innermost first: a container is judged once its parts
        are right."""
        failing: dict[str, str] = {}
        for kind in sorted(self.waiting, key=lambda kind: -max(n.count(".") for n in self.instances[kind])):
            called = [name for name in self.instances[kind] if name in self.calls]
            verdicts = [module_verdict(ported.get_submodule(name), self.calls[name]) for name in called]
            error, raised = max(verdicts, key=lambda verdict: verdict[0])
            self.errors[kind] = error
            inner = any(self._within(f, kind) for f in failing)
            if not error <= BOUND and not inner:
                failing[kind] = raised or f"float64 proof gives relative error {error:.1e}, the bound is {BOUND:.0e}"
        return failing

    def _within(self, inner: str, outer: str) -> bool:
        """Whether any module of class `inner` lies in one of class `outer`."""
        containers = tuple(f"{name}." for name in self.instances[outer])
        return any(name.startswith(containers) for name in self.instances[inner])

    def _reject_one(self, proof: Proof) -> None:
        """Drop the class without which the whole model agrees (its own proof saw only a prefill)."""
        for kind in sorted(self.waiting, key=lambda kind: self.instances[kind][0].count(".")):
            # Without this class others are dropped for want of it: they come back with it.
            before = {name: list(candidates) for name, candidates in self.waiting.items()}, dict(self.near_misses)
            kept = self.waiting.pop(kind)
            try:
                _, ported = self._generate()
                passed = prove_model(self.source, ported).passed
            finally:
                self.waiting, self.near_misses = before
            if passed:
                self.reject(kind, f"{kept[0].variant}: with it the model differs in {proof.worst()}", 0.0)
                return
        raise Refusal(
            f"{self.class_name}: the ported model differs from upstream in {proof.worst()} "
            f"(bound {BOUND:.0e}), and no single class is to blame"
        )


def _hidden_limit(candidates: Sequence[Candidate], parts: Sequence[nn.Module]) -> str | None:
    """What the proof of these candidates might not see in any of a class's instances."""
    ported = "".join(inspect.getsource(kind) for kind in {candidate.forward for candidate in candidates})
    return next((limit for part in parts if (limit := hidden_limit(part, ported))), None)


def _common_candidates(rewrite: Rewrite, parts: Sequence[nn.Module]) -> list[Candidate] | Mismatch | None:
    """Candidates that fit every instance of a class."""
    found = [rewrite.candidates(part) for part in parts]
    mismatch = next((f for f in found if isinstance(f, Mismatch)), None)
    if mismatch is not None or not any(found):
        return mismatch
    lists = [f if isinstance(f, list) else [] for f in found]
    common = [candidate for candidate in lists[0] if all(candidate in each for each in lists[1:])]
    return common or Mismatch("its instances differ, and no one form fits all of them")


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
