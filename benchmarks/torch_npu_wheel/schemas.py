"""The catalogue's schemas against those of a dispatcher, argument by argument."""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.catalogue.vendor_op import VendorOp

NAMESPACE = "npu"


def differences(ours: str, theirs: str) -> list[str]:
    """How two schemas ("npu::name(Tensor x) -> Tensor") differ, a line for each difference; none where they agree.

    Compared are order, names, types, defaults, keyword-only marks and alias annotations of the arguments, and types and
    alias annotations of the results.
    """
    mine, other = torch._C.parse_schema(ours), torch._C.parse_schema(theirs)
    found = []
    names, wanted = [a.name for a in mine.arguments], [a.name for a in other.arguments]
    if names != wanted:
        found.append(f"arguments are {', '.join(names)}; the wheel has {', '.join(wanted)}")
    described = {a.name: _traits(a) for a in other.arguments}
    for argument in mine.arguments:
        for trait, value in _traits(argument).items():
            theirs_value = described.get(argument.name, {}).get(trait, value)
            if value != theirs_value:
                found.append(f"{argument.name}: {trait} is {value}; the wheel has {theirs_value}")
    results, wanted_results = ([(_type(r), _alias(r)) for r in s.returns] for s in (mine, other))
    if results != wanted_results:
        found.append(f"results are {results}; the wheel has {wanted_results}")
    if not found and str(mine) != str(other):
        found.append(f"is {mine}; the wheel has {other}")
    return found


def check_op(op: VendorOp, module: Any) -> list[str]:
    """How `op` differs from the dispatcher's operator of its name and from what `module`, torch_npu, offers."""
    name = f"{NAMESPACE}::{op.name}"
    found = [str(s) for s in torch._C._jit_get_schemas_for_operator(name) if s.overload_name == ""]
    if not found:
        return [f"{op.name}: the wheel has no such operator"]
    reported = [] if callable(getattr(module, op.name, None)) else [f"{op.name}: torch_npu has no such function"]
    return reported + [f"{op.name}: {line}" for line in differences(name + op.schema, found[0])]


def _traits(argument: Any) -> dict[str, str]:
    default = repr(argument.default_value) if argument.has_default_value() else "none"
    return {
        "type": _type(argument),
        "default": default,
        "keyword-only": str(argument.kwarg_only),
        "alias": _alias(argument),
    }


def _type(argument: Any) -> str:
    # real_type tells ScalarType from int, N the length of int[3]; `type` tells neither.
    return f"{argument.real_type}{'' if argument.N is None else f'({argument.N})'}"


def _alias(argument: Any) -> str:
    info = argument.alias_info
    if info is None:
        return "none"
    return f"{'|'.join(sorted(info.before_set))}{'!' if info.is_write else ''}"
