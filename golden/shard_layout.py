"""How the tensors of tensor-parallel and expert-parallel ranks make up the tensors of the whole model.

A rule names modules by a regular expression (searched for in their names; the first that matches counts) and says how
what they are given and what they return is put together:

``"replicated"``          every rank holds the whole, and must hold the same
``"reduced"``             the same on every rank where it was summed over the ranks already, else partial sums: added
                          (or rank 0's, where the module around it shows that nobody added them)
``"sum"``                 partial sums: added
``{"concat": dim}``       parts along a dimension, in the order of ranks; neighbours with equal parts hold copies of one
                          (key-value heads on more ranks than there are heads), ``"copies"`` says how many; a field
                          of the config as ``"whole"`` tells parts from the whole (the vocabulary on every rank)
``{"interleave": size}``  the last dimension in groups of ``size`` (heads), dealt to the ranks in turn
``{"parts": [sizes]}``    each rank's last dimension is a concatenation (of its query, key and value heads, of its gate
                          and up rows): every part is put together by itself; sizes are in proportion

``output`` may be a list: of the first tensor, of the second, and so on, the last for all that follow. ``"experts":
"local"`` says that ranks number their experts from 0 each (``experts.<number>``): they are numbered on through.
``"omit": true`` leaves modules out that the ranks do not call alike. ``"weight"`` says how the ranks' weights make up
the module's, where that does not follow from their shapes and ``output``; its ``concat`` is a dimension of the weight.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from porter.errors import PorterError

Way = str | Mapping[str, Any]
_WORDS = ("replicated", "reduced", "sum")
_KEYS = ("concat", "interleave", "parts")
_FIELDS = ("module", "inputs", "output", "experts", "omit", "weight")


@dataclass(frozen=True)
class Rule:
    """How the modules whose names match are spread over the ranks."""

    module: re.Pattern[str]
    inputs: Way = "replicated"
    output: tuple[Way, ...] = ("replicated",)
    local_experts: bool = False
    omit: bool = False
    weight: Way | None = None

    def way(self, place: int) -> Way:
        """How the output tensor at this place is put together."""
        return self.output[min(place, len(self.output) - 1)]


_LAST: Way = {"concat": -1}
_HEADS: Way = {"concat": -2}


def _rule(pattern: str, inputs: Way = "replicated", *output: Way) -> Rule:
    return Rule(re.compile(pattern), inputs, output or ("replicated",))


DEFAULTS = (
    Rule(re.compile(r"(^|\.)experts\.act_fn$"), omit=True),
    _rule(r"(^|\.)(q|k|v|q_b|kv_b|gate|up)_proj$", "replicated", _LAST),
    _rule(r"(^|\.)gate_up_proj$", "replicated", {"parts": [1, 1]}),
    _rule(r"(^|\.)(o|out|down)_proj$", _LAST, "reduced"),
    _rule(r"(^|\.)(q|k)_norm$", _HEADS, _HEADS),
    _rule(r"(^|\.)act_fn$", _LAST, _LAST),
    _rule(r"(^|\.)embed_tokens$", "replicated", "reduced"),
    _rule(r"(^|\.)(shared_)?experts$", "replicated", "reduced"),
    _rule(r"(^|\.)self_attn$", "replicated", "replicated", {"concat": 1}),
    _rule(r"(^|\.)lm_head$|^$", "replicated", {"concat": -1, "whole": "vocab_size"}),
    _rule(r""),
)
"""Column-parallel and row-parallel layers by transformers' names, experts by the ranks that hold them; else whole."""


def rules_of(layout: Sequence[Mapping[str, Any]] | None, where: str = "layout") -> tuple[Rule, ...]:
    """The rules of a layout, before the defaults; PorterError naming the entry and field that is wrong."""
    found = []
    for number, entry in enumerate(layout or ()):
        at = f"{where}: entry {number}"
        if not isinstance(entry, Mapping) or not isinstance(entry.get("module"), str):
            raise PorterError(f"{at}: expected an object with a regular expression as `module`")
        unknown = sorted(entry.keys() - set(_FIELDS))
        if unknown:
            raise PorterError(f"{at}: `{unknown[0]}` is no field; known are {', '.join(_FIELDS)}")
        try:
            pattern = re.compile(entry["module"])
        except re.error as error:
            raise PorterError(f"{at}: module {entry['module']!r} is no regular expression: {error}") from error
        output = entry.get("output", "replicated")
        ways = tuple(output) if isinstance(output, list) else (output,)
        if not ways:
            raise PorterError(f"{at}: output is an empty list; say how it is put together")
        for field, way in (("inputs", entry.get("inputs", "replicated")), *(("output", each) for each in ways)):
            _check(way, f"{at}: {field}")
        weight = entry.get("weight")
        if weight is not None:
            _check(weight, f"{at}: weight")
        if entry.get("experts", "local") != "local":
            raise PorterError(f"{at}: experts is {entry['experts']!r}; the only word is local")
        omit = entry.get("omit", False)
        if not isinstance(omit, bool):
            raise PorterError(f"{at}: omit is {omit!r}, expected true or false")
        found.append(Rule(pattern, entry.get("inputs", "replicated"), ways, "experts" in entry, omit, weight))
    return (*found, *DEFAULTS)


def read_layout(path: Path) -> tuple[Rule, ...]:
    """The rules of a layout file: a JSON list of entries."""
    try:
        layout = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PorterError(f"{path}: not readable as JSON ({error}); give a list of rules") from error
    if not isinstance(layout, list):
        raise PorterError(f"{path}: expected a list of rules; each is an object with `module`, `inputs`, `output`")
    return rules_of(layout, str(path))


def rule_of(rules: Sequence[Rule], module: str) -> Rule:
    """The first rule that matches a module's name."""
    return next(rule for rule in rules if rule.module.search(module))


def _check(way: Any, at: str) -> None:
    if isinstance(way, str) and way in _WORDS:
        return
    known = [key for key in _KEYS if isinstance(way, Mapping) and key in way]
    if len(known) == 1 and isinstance(way, Mapping):
        value = way[known[0]]
        whole = type(value) is int and (value > 0 or known[0] == "concat")
        parts = isinstance(value, list) and value and all(type(size) is int and size > 0 for size in value)
        copies = way.get("copies", 1)
        if (parts if known[0] == "parts" else whole) and type(copies) is int and copies > 0:
            return
    raise PorterError(f"{at} is {way!r}; use one of {', '.join(_WORDS)}, or an object with one of {', '.join(_KEYS)}")
