"""The constraints that recur in the vendor's documents, each made from names and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from porter.kernels.ascend.catalogue.vendor_op import Call, Rule

SHORT = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.quint4x2: "i4",
}
LONG = {short: dtype for dtype, short in SHORT.items()}


def short(dtype: torch.dtype) -> str:
    """f16, bf16, f32, i8 ...; torch's own name where this table has none."""
    return SHORT.get(dtype, str(dtype).removeprefix("torch."))


def tensors_of(call: Call, name: str) -> list[torch.Tensor]:
    """The tensors of an argument: one, a list of them, or none where it is None."""
    value = call[name]
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in value or () if isinstance(v, torch.Tensor)]


def dtypes(names: str, table: str, chips: Sequence[str] = ()) -> Rule:
    """The arguments `names` ("input gamma") have one of the dtype combinations of `table` ("f16/f16 bf16/f32"); an
    argument that is None fits "-" and any dtype."""
    wanted = tuple(names.split())
    rows = [tuple(row.split("/")) for row in table.split()]

    def holds(call: Call) -> bool:
        present = [{short(t.dtype) for t in tensors_of(call, name)} for name in wanted]
        return any(all(not p or p == {cell} for p, cell in zip(present, row, strict=True)) for row in rows)

    return Rule(wanted, f"{' / '.join(wanted)} as {', '.join('/'.join(r) for r in rows)}", holds, tuple(chips))


def rank(name: str, *allowed: int, chips: Sequence[str] = ()) -> Rule:
    """The tensor `name` has one of these numbers of dimensions."""
    text = " or ".join(map(str, allowed))
    return Rule(
        (name,),
        f"{name} of {text} dimensions",
        lambda call: all(t.dim() in allowed for t in tensors_of(call, name)),
        tuple(chips),
    )


def contiguous(*names: str, chips: Sequence[str] = ()) -> Rule:
    """Every tensor of `names` is contiguous."""
    return Rule(
        names,
        f"{', '.join(names)} contiguous",
        lambda call: all(t.is_contiguous() for name in names for t in tensors_of(call, name)),
        tuple(chips),
    )


def one_of(name: str, *allowed: Any, chips: Sequence[str] = ()) -> Rule:
    """The scalar `name` is one of `allowed`."""
    text = ", ".join(map(repr, allowed))
    return Rule((name,), f"{name} to be one of {text}", lambda call: call[name] in allowed, tuple(chips))


def size(name: str, dimension: int, says: str, holds: Callable[[int], bool], chips: Sequence[str] = ()) -> Rule:
    """Dimension `dimension` of the tensor `name` satisfies `holds`; `says` completes "dimension d of name"."""
    return Rule(
        (name,),
        f"dimension {dimension} of {name} {says}",
        lambda call: all(
            -t.dim() <= dimension < t.dim() and holds(int(t.shape[dimension])) for t in tensors_of(call, name)
        ),
        tuple(chips),
    )


def multiple(name: str, dimension: int, of: int, chips: Sequence[str] = ()) -> Rule:
    """Dimension `dimension` of `name` is a multiple of `of`."""
    return size(name, dimension, f"a multiple of {of}", lambda n: n % of == 0, chips)


def same_shape(*names: str, chips: Sequence[str] = ()) -> Rule:
    """All of `names` have one shape; None is left out."""
    return Rule(
        names,
        f"{', '.join(names)} of one shape",
        lambda call: len({tuple(t.shape) for name in names for t in tensors_of(call, name)}) <= 1,
        tuple(chips),
    )


def absent(*names: str, why: str = "is not modelled by porter", chips: Sequence[str] = ()) -> Rule:
    """The arguments are None: their semantics are `why`."""
    return Rule(
        names,
        f"no {' or '.join(names)}, which {why}",
        lambda call: all(call[name] is None for name in names),
        tuple(chips),
    )


def given(*names: str, why: str, chips: Sequence[str] = ()) -> Rule:
    """The arguments are not None, because `why`."""
    return Rule(
        names,
        f"{', '.join(names)}: {why}",
        lambda call: all(call[name] is not None for name in names),
        tuple(chips),
    )


def that(says: str, holds: Callable[[Call], bool], *names: str, chips: Sequence[str] = ()) -> Rule:
    """Any other constraint: `says` in words, `names` the arguments to show when it is broken."""
    return Rule(names, says, holds, tuple(chips))


def not_empty(*names: str, chips: Sequence[str] = ()) -> Rule:
    """No tensor of `names` is empty."""
    return Rule(
        names,
        f"no empty {' or '.join(names)}",
        lambda call: all(t.numel() > 0 for name in names for t in tensors_of(call, name)),
        tuple(chips),
    )
