"""A model family: where upstream keeps it, what is special, and its importable ported classes."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from porter.correspondence import Correspondence
from porter.errors import PorterError
from porter.models.auto_class import auto_class_name, model_class_name
from porter.models.checkpoint_layout import Stored, checkpoint_layout
from porter.models.config_rules import check_config
from porter.models.loading import registered_conversions
from porter.models.port import PortedSource, port_source, source_on_meta
from porter.models.prediction import Prediction, PredictionNames, prediction_layers, prediction_of
from porter.models.prediction_proof import with_prediction_layer
from porter.models.search import correspondence_of

UNLISTED = "not a family that porter knows: matched by structure alone"


@dataclass(frozen=True)
class Family:
    """One of the model families that porter ports.

    `expected` are the rewrites that every model of the family must match; `special` says in words what sets it apart;
    `prediction` is how its checkpoints name multi-token prediction layers, where porter ports these.
    """

    model_type: str
    module: str
    class_name: str
    expected: tuple[str, ...]
    special: tuple[str, ...]
    prediction: PredictionNames | None = None

    @property
    def auto_class(self) -> str:
        """The auto class of transformers that builds the model."""
        return auto_class_name(self.model_type)

    def port(self, config: Any, chip: str = "cpu") -> PortedSource:
        """Generate and prove the ported file for `config`. Raises PorterError naming a rewrite that did not match."""
        source = _port(self, json.dumps(config.to_dict(), sort_keys=True, default=str), chip, _Hold(config))
        matched = {c.candidate.rewrite for c in source.classes}
        missing = [name for name in self.expected if name not in matched]
        if missing:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in source.near_misses.items()) or "no class fits"
            raise PorterError(f"{self.model_type}: no class matched {', '.join(missing)} ({reasons})")
        return source

    def correspondence(self, config: Any, source: PortedSource) -> Correspondence:
        """Between the upstream class of `config` and its port."""
        upstream = source_on_meta(config, self.module, self.class_name)
        return correspondence_of(upstream, {c.name: c.candidate for c in source.classes})

    def checkpoint_layout(self, config: Any, stored: Stored = ()) -> Correspondence:
        """Between checkpoints on disk and the upstream class; `stored` is what the checkpoint at hand holds."""
        return checkpoint_layout(source_on_meta(config, self.module, self.class_name), stored)

    def predicting(self, config: Any, source: PortedSource, stored: Collection[str] = ()) -> Prediction | None:
        """The prediction layers of the model; None where there are none, or the checkpoint at hand leaves them out.

        Without a checkpoint at hand, they are those that the config counts: of the same class, some released models
        have a layer that their config does not speak of (Qwen3-Next), and some have none (Qwen3-Coder-Next).
        """
        names = self.prediction
        if names is None or not prediction_layers(config, names.unsaid):
            return None
        found = prediction_of(config, self.module, self.class_name, source, names, stored)
        return found if (found.stored(stored) if stored else prediction_layers(config)) else None


@dataclass(frozen=True)
class _Hold:
    """Carries the config past the cache key, which is its JSON."""

    config: Any

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hold)


@functools.lru_cache(maxsize=16)
def _port(family: Family, key: str, chip: str, hold: _Hold) -> PortedSource:
    source = port_source(hold.config, family.module, family.class_name, chip)
    if family.prediction is None or not prediction_layers(hold.config, family.prediction.unsaid):
        return source
    return with_prediction_layer(source, hold.config)


def importable(family: Family) -> type[Any]:
    """The family's ported class: `from_pretrained` on an original checkpoint converts while loading.

    The class is generated for the family's default config. Where a checkpoint's config needs another form (no low-rank
    query, half rope), `from_pretrained` returns a model of the class generated for that config.
    """
    config_class = _config_class(family)
    generated: Any = family.port(config_class()).model_class()
    return type(
        family.class_name, (_Converting, generated), {"porter_family": family, "__module__": generated.__module__}
    )


def lazily(family: Family, namespace: dict[str, Any]) -> Callable[[str], Any]:
    """`__getattr__` of a family's module with that `namespace`: the ported class, made when it is first asked for."""

    def attribute(name: str) -> Any:
        if name != family.class_name:
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
        namespace[name] = importable(family)
        return namespace[name]

    return attribute


def _config_class(family: Family) -> Any:
    return getattr(importlib.import_module(family.module), family.class_name).config_class


class _Converting:
    """Adds conversion while loading to a generated class."""

    porter_family: Family

    @classmethod
    def from_pretrained(cls, path: Any, *arguments: Any, **keywords: Any) -> Any:
        """As transformers' `from_pretrained`, on a checkpoint with upstream's names; runs no code from it."""
        family = cls.porter_family
        config = keywords.get("config") or _config_class(family).from_pretrained(path)
        check_config(config, f"{path}/config.json")
        source = family.port(config)
        generated: Any = source.model_class()
        correspondence = family.correspondence(config, source)
        with registered_conversions(family.class_name, family.model_type, correspondence):
            with torch.no_grad():
                return generated.from_pretrained(path, *arguments, **{**keywords, "config": config})


FAMILY_FILES = (
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
    "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4",
)  # fmt: skip


def families() -> dict[str, Family]:
    """Every family that porter knows by name, by model type."""
    found = {}
    for name in FAMILY_FILES:
        family: Family = importlib.import_module(f"porter.models.{name}").FAMILY
        found[family.model_type] = family
    return found


def family_of(model_type: str, where: str = "model_type") -> Family:
    """The family of a model type: a known one, or one made of transformers' class and matched by structure alone.

    `where` the type was given begins the PorterError for a type of which transformers has no causal language model.
    """
    known = families()
    if model_type in known:
        return known[model_type]
    class_name = model_class_name(model_type)
    if class_name is None:
        raise PorterError(f"{where}: transformers has no causal language model of type {model_type!r}")
    module = str(getattr(transformers, class_name).__module__)
    return Family(model_type, module, class_name, expected=(), special=(UNLISTED,))
