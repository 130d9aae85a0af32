"""Port a model's classes: match, generate, prove, and keep only what the proof passes."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from porter.errors import Refusal
from porter.models.generated import import_text, own_package
from porter.models.proof import Proof, one_thread
from porter.models.rewrite import Candidate
from porter.models.rewrites import REWRITES
from porter.models.search import Search


@dataclass(frozen=True)
class PortedClass:
    """An upstream class, the candidate that replaces it, and the error of its own proof."""

    name: str
    candidate: Candidate
    error: float


@dataclass(frozen=True)
class PortedSource:
    """A generated modelling file with the proof behind it.

    `near_misses` are the classes that a rewrite looked at and did not port; `left` are all that were not ported, each
    with its reason. `prediction_error` is that of its prediction layer's own proof, where it has one.
    """

    module: str
    class_name: str
    chip: str
    text: str
    classes: tuple[PortedClass, ...]
    near_misses: Mapping[str, str]
    proof: Proof
    left: Mapping[str, str] = field(default_factory=dict)
    prediction_error: float | None = None

    @property
    def file_name(self) -> str:
        """modeling_<family>_<chip>.py, with the chip's dashes as underscores."""
        return f"{self.module.rsplit('.', 1)[1]}_{self.chip.replace('-', '_')}.py"

    def load(self) -> ModuleType:
        """The generated module, imported."""
        return import_text(self.text, self.file_name.removesuffix(".py"), own_package(self.module))

    def model_class(self) -> type[nn.Module]:
        """The ported causal language model class."""
        return getattr(self.load(), self.class_name)  # type: ignore[no-any-return]


def port_source(config: Any, module: str, class_name: str, chip: str) -> PortedSource:
    """Port the classes of upstream `module` for models of `config`, proven at reduced width in float64.

    Raises Refusal naming the part of the proof that fails when the whole model does not agree although its parts do,
    and one with the reason for every class when none can be ported.
    """
    with one_thread(), _only_errors():
        search = Search.begin(config, module, class_name, chip, REWRITES)
        text, _, proof = search.settle()
    classes = tuple(PortedClass(n, c, search.errors[n]) for n, c in search.chosen().items())
    left = search.left()
    if not classes:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left.items())
        raise Refusal(f"{class_name}: no class of {module} can be ported ({reasons})")
    return PortedSource(module, class_name, chip, text, classes, dict(search.near_misses), proof, left=left)


def tied_weights(config: Any, module: str, class_name: str) -> dict[str, str]:
    """The parameters that a model of `config` ties, and so does not store: name -> the one that each equals."""
    return dict(getattr(source_on_meta(config, module, class_name), "all_tied_weights_keys", None) or {})


@contextmanager
def _only_errors() -> Iterator[None]:
    """No advice from transformers within: what it says of ids and speed is of the reduced model, not the user's."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def source_on_meta(config: Any, module: str, class_name: str) -> nn.Module:
    """The upstream model of `config` without storage; building one writes into its config, so it gets a copy."""
    with torch.device("meta"):
        return getattr(importlib.import_module(module), class_name)(copy.deepcopy(config))  # type: ignore[no-any-return]
