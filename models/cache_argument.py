"""What models call the argument that is a key-value cache, and which of them take one that they are given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

CACHE_NAMES = ("cache", "past_key_values")
"""In transformers 5, and in code written before."""


def cache_keyword(model: Any) -> str:
    """The name under which the forward of `model`'s class takes a cache; empty where it takes none."""
    parameters = forward_parameters(model)
    return next((name for name in CACHE_NAMES if name in parameters), "")


def forward_parameters(model: Any) -> frozenset[str]:
    """The names that the forward of `model`'s class takes."""
    return _parameters(type(model).forward)


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def makes_its_own_cache(model: Any) -> bool:
    """Whether `model` says that it works with a cache of its own kind alone."""
    supports = getattr(model, "_supports_default_dynamic_cache", None)
    return supports is not None and not supports()
