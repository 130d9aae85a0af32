"""What the grouped products share: which dtypes go together, and what group_list says."""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.catalogue.quantization_dtypes import as_dtype
from porter.kernels.ascend.catalogue.rules import short, tensors_of, that
from porter.kernels.ascend.catalogue.vendor_op import Call, Rule

PACKED = 8
"""int4 values in one int32."""
UNDEFINED_BYTE = 0x7F
"""What the emulator fills undefined integers with."""
INNER_LIMIT = 65536


def sole(call: Call, name: str) -> Any:
    """The one tensor of a list, the tensor itself, or None where there is none."""
    tensors = tensors_of(call, name)
    return tensors[0] if len(tensors) == 1 else None


def columns(weight: torch.Tensor) -> int:
    """N of a weight [E, K, N], whose last dimension is packed by eight where it is int32."""
    return int(weight.shape[-1]) * (PACKED if weight.dtype == torch.int32 else 1)


def is_int4(call: Call) -> bool:
    """Whether `weight` holds int4 values packed in int32."""
    return bool(sole(call, "weight").dtype == torch.int32)


def transposed(tensor: torch.Tensor) -> bool:
    """Whether the last two dimensions are a transposed view of a contiguous tensor, as the vendor tells it."""
    return tensor.stride(-2) == 1 and tensor.stride(-1) == tensor.shape[-2] and tensor.shape[-2] > 1


def combination(names: str, table: str, chips: tuple[str, ...]) -> Rule:
    """The arguments have the dtypes of one row of `table`: "-" is None, "f32?" may be None; output_dtype may stand
    among the names, whose None is the dtype of x."""
    wanted = tuple(names.split())
    rows = [tuple(row.split("/")) for row in table.split()]

    def cell(call: Call, name: str) -> str:
        if name == "output_dtype":
            return short(as_dtype(call[name]) or sole(call, "x").dtype)
        found = {short(t.dtype) for t in tensors_of(call, name)}
        return found.pop() if len(found) == 1 else "-"

    def holds(call: Call) -> bool:
        cells = [cell(call, name) for name in wanted]
        return any(all(map(_fits, cells, row)) for row in rows)

    return Rule(wanted, f"{' / '.join(wanted)} as {', '.join('/'.join(r) for r in rows)}", holds, chips)


def _fits(cell: str, wanted: str) -> bool:
    return cell == wanted or (wanted[-1] == "?" and cell in ("-", wanted[:-1]))


def single(*names: str) -> Rule:
    """Each of the lists holds one tensor; other lists are not modelled."""
    return that(
        f"one tensor in each of {', '.join(names)}, more are not modelled by porter",
        lambda call: all(call[name] is None or len(tensors_of(call, name)) == 1 for name in names),
        *names,
    )


def shape_of(name: str, says: str, wanted: Any) -> Rule:
    """The tensor `name`, where given, has the shape `wanted(call)`, which `says` writes."""
    return that(
        f"{name} {says}",
        lambda call: (t := sole(call, name)) is None or tuple(t.shape) == tuple(wanted(call)),
        name,
        "x",
        "weight",
    )


def groups(call: Call, weight: str) -> int:
    """Rows of group_list: the experts of `weight`."""
    return int(sole(call, weight).shape[0])


def group_list_rules(weight: str) -> tuple[Rule, ...]:
    """Shape and kind of group_list for the experts of the argument `weight`."""
    return (
        that(
            "group_list int64 of one value for each expert, at most 1024",
            lambda call: (
                call["group_list"] is not None
                and call["group_list"].dtype == torch.int64
                and tuple(call["group_list"].shape) == (groups(call, weight),)
                and groups(call, weight) <= 1024
            ),
            "group_list",
            weight,
        ),
    )


def sizes_of(group_list: torch.Tensor, group_list_type: int) -> torch.Tensor:
    """Rows of each group, from prefix sums (0) or counts (1)."""
    return torch.diff(group_list, prepend=group_list.new_zeros(1)) if group_list_type == 0 else group_list


def undefined(rows: torch.Tensor) -> bool:
    """Whether all of `rows` is what the emulator leaves where the vendor documents nothing."""
    return bool(rows.isnan().all() if rows.is_floating_point() else (rows == UNDEFINED_BYTE).all())


def covers(kind: Any) -> Rule:
    """The values of group_list: sizes that are not negative and cover all rows of x that hold tokens.

    `kind(call)` is 0 for prefix sums and 1 for counts. Later rows are left alone, so none may hold a token.
    """

    def holds(call: Call) -> bool:
        sizes, x = sizes_of(call["group_list"], kind(call)), sole(call, "x")
        total = int(sizes.sum())
        return bool((sizes >= 0).all()) and total <= x.shape[0] and undefined(x[total:])

    return that(
        "group_list to cover the rows of x that hold tokens: prefix sums that end there where group_list_type is 0, "
        "counts that add up to them where it is 1",
        holds,
        "group_list",
        "x",
    )
