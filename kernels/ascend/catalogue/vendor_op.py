"""What one operator of torch_npu takes: its schema, and the constraints that the vendor's own checks leave out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

A2, A3, A5, I310P = "ascend-910b", "ascend-910c", "ascend-950", "ascend-310p"
CHIPS = (A2, A3, A5, I310P)
FRACTAL_NZ = 29
"""The vendor's number of the blocked layout that its matrix units read."""
PAGES = "op-plugin docs/zh/custom_APIs/torch_npu/"
"""Where the vendor's pages of its operators lie."""
POWERS_OF_TWO = (1, 2, 4, 8, 16, 32, 64, 128)
"""The counts of heads that latent attention takes, among others."""


class VendorRefusal(Exception):
    """A call that the vendor's documentation does not allow, in words that name the operator and the argument."""


@dataclass(frozen=True)
class Argument:
    """One argument of a schema."""

    name: str
    default: Any
    required: bool
    keyword_only: bool
    mutated: bool


@dataclass(frozen=True)
class Call:
    """One call of an operator on a chip, with every argument by name, defaults filled in."""

    op: VendorOp
    chip: str
    arguments: Mapping[str, Any]
    given: frozenset[str]
    """Names of the arguments that the caller passed."""

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


@dataclass(frozen=True)
class Rule:
    """A constraint: `holds(call)` is whether a call keeps it, `says` the constraint in words that stand after "needs".

    `names` are the arguments that a refusal shows. `chips`: where the rule applies; everywhere when empty.
    """

    names: tuple[str, ...]
    says: str
    holds: Callable[[Call], bool]
    chips: tuple[str, ...] = ()


@dataclass(frozen=True)
class VendorOp:
    """An operator of torch_npu.

    `schema` is the published one without the name. `page` names the vendor's document, or says where else the
    constraints were read. `outputs(call)` gives empty outputs of the documented shapes and dtypes on the device of the
    arguments. `rules` need shapes, dtypes and scalars alone; `value_rules` need the tensors' values, which only the
    emulator looks at. `explicit` are the arguments whose default is not what models need: leaving one out is refused.
    `nz` are the arguments that may be in FRACTAL_NZ, and `must_be_nz(call)` those that are read so whatever they are.
    """

    name: str
    schema: str
    page: str
    chips: tuple[str, ...]
    outputs: Callable[[Call], Any]
    rules: tuple[Rule, ...] = ()
    value_rules: tuple[Rule, ...] = ()
    explicit: tuple[str, ...] = ()
    nz: tuple[str, ...] = ()
    must_be_nz: Callable[[Call], tuple[str, ...]] = lambda call: ()
    note: str = ""

    @cached_property
    def signature(self) -> tuple[Argument, ...]:
        """The arguments of the schema, in order."""
        parsed = torch._C.parse_schema(f"npu::{self.name}{self.schema}")
        return tuple(
            Argument(
                a.name,
                a.default_value,
                not a.has_default_value(),
                a.kwarg_only,
                a.alias_info is not None and a.alias_info.is_write,
            )
            for a in parsed.arguments
        )

    def bind(self, chip: str, positional: Sequence[Any], keywords: Mapping[str, Any]) -> Call:
        """The call with its arguments by name. Raises TypeError as Python does for arguments that do not fit."""
        ordered = [a for a in self.signature if not a.keyword_only]
        if len(positional) > len(ordered):
            raise TypeError(f"{self.name}: takes {len(ordered)} positional arguments, {len(positional)} were given")
        given = {a.name: value for a, value in zip(ordered, positional, strict=False)}
        known = {a.name for a in self.signature}
        for name, value in keywords.items():
            if name not in known:
                raise TypeError(f"{self.name}: has no argument {name}; it has {', '.join(sorted(known))}")
            if name in given:
                raise TypeError(f"{self.name}: {name} is given twice")
            given[name] = value
        arguments = {}
        for argument in self.signature:
            if argument.name not in given and argument.required:
                raise TypeError(f"{self.name}: {argument.name} is missing")
            arguments[argument.name] = given.get(argument.name, argument.default)
        return Call(self, chip, arguments, frozenset(given))

    def refusal(self, call: Call, values: bool = False) -> str | None:
        """Why the vendor does not document this call, or None where it does; with `values` the tensors' values too."""
        if call.chip not in self.chips:
            return f"{self.name}: is not documented for {call.chip} (only {', '.join(self.chips)})"
        for rule in (*self.rules, *(self.value_rules if values else ())):
            if (not rule.chips or call.chip in rule.chips) and not rule.holds(call):
                shown = ", ".join(f"{name} is {described(call[name])}" for name in rule.names)
                return f"{self.name}: needs {rule.says}; {shown}"
        return None

    def left_out(self, call: Call) -> str | None:
        """The first of `explicit` that the caller did not pass, in words; None where all were. torch's dispatcher drops
        arguments that equal their default, so only the caller's own arguments tell."""
        for name in self.explicit:
            if name not in call.given:
                default = call.arguments[name]
                return f"{self.name}: {name} is left out; its default {default!r} is not what models need, so pass it"
        return None

    def check(self, call: Call, values: bool = False) -> None:
        """Raise VendorRefusal where `refusal` has a reason."""
        reason = self.refusal(call, values)
        if reason is not None:
            raise VendorRefusal(reason)


def described(value: Any) -> str:
    """A value in a few words: dtype[shape] of a tensor."""
    if isinstance(value, torch.Tensor):
        strided = "" if value.is_contiguous() else " not contiguous"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{strided}"
    if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
        return f"[{', '.join(map(described, value))}]"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
