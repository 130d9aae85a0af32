"""How checkpoints on disk store what the upstream class holds: transformers' registered conversions, as entries.

transformers renames and joins tensors while it loads, and undoes that when it saves. Its own undoing tells the names
on disk; that an entry joins those tensors as transformers does is checked by value on small tensors, so a conversion
that does anything else (transposing, permuting, splitting one tensor over several parameters) is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, conversion_mapping
from transformers.core_model_loading import PrefixChange, Transpose, revert_weight_conversion

from porter.correspondence import Correspondence, Entry
from porter.errors import PorterError

PROBE = 12
"""Rows and columns of the small tensors: divisible by 2, 3, 4 and 6, the numbers of parts that conversions have."""

CANNOT_REVERT = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, NotImplementedError)
"""What transformers' conversions raise for one parameter of several that they need together."""


Stored = Collection[str] | Mapping[str, tuple[int, ...]]
"""The names of the tensors in a checkpoint, or their shapes by name."""


def checkpoint_layout(upstream: nn.Module, stored: Stored = ()) -> Correspondence:
    """Between a checkpoint on disk and `upstream` (on the meta device); what is not listed is stored as it is.

    `stored` are the names that the checkpoint has, best with shapes: of the forms that transformers reads, a parameter
    takes the first that is stored, which is the released one where none is. Raises PorterError naming the parameter
    and the conversion of a form that porter cannot join.
    """
    conversions = _conversions(upstream)
    if not conversions:
        return Correspondence(())
    names = frozenset(stored)
    forms = [conversions]
    if any(isinstance(c, PrefixChange) for c in conversions):
        forms.append([c for c in conversions if not isinstance(c, PrefixChange)])
    checked: set[tuple[str, ...]] = set()
    entries = []
    for name, tensor in upstream.state_dict().items():
        found = [_entry(upstream, form, name, tensor, checked) for form in forms]
        entry = next((e for e in found if e is not None and names.issuperset(e.sources)), found[0])
        if entry is not None and entry.kind == "transposed" and not _stored_transposed(entry, tensor, stored):
            entry = None
        if entry is not None and (name not in names or names.issuperset(entry.sources)):
            entries.append(entry)
    _refuse_shared(upstream, conversions, entries)
    return Correspondence(tuple(entries))


def _refuse_shared(upstream: nn.Module, form: list[Any], entries: Iterable[Entry]) -> None:
    """One tensor on disk that several parameters come from is split while loading, which no entry says."""
    owners: dict[str, str] = {}
    for entry in entries:
        for source in entry.sources:
            if source in owners:
                raise _not_understood(upstream, owners[source], form, f"{source} also makes {entry.target}")
            owners[source] = entry.target


def _conversions(upstream: nn.Module) -> list[Any]:
    if not isinstance(upstream, PreTrainedModel):
        return []
    return list(conversion_mapping.get_model_conversion_mapping(upstream, add_legacy=False))


def _entry(
    upstream: nn.Module, form: list[Any], name: str, tensor: torch.Tensor, checked: set[tuple[str, ...]]
) -> Entry | None:
    """The entry of one parameter, or None where the form stores it under its own name as it is."""
    disk = _reverted(upstream, form, name, torch.empty(tensor.shape, device="meta"))
    if list(disk) == [name]:
        return _under_its_own_name(upstream, form, name, tensor)
    entry = _joined(name, disk, tuple(tensor.shape))
    key = tuple(re.sub(r"\d+", "*", n) for n in (name, *entry.sources[: len(entry.sizes)]))
    if key not in checked:
        _check_by_value(upstream, form, entry, tensor)
        checked.add(key)
    return entry


def _under_its_own_name(upstream: nn.Module, form: list[Any], name: str, tensor: torch.Tensor) -> Entry | None:
    """Of a parameter that keeps its name on disk: None where it is stored as it is, else that it is transposed."""
    operations = [o for c in _matching(form, name) for o in getattr(c, "operations", ())]
    if not operations:
        return None
    last = tensor.dim() - 2, tensor.dim() - 1
    if not all(isinstance(o, Transpose) and (o.dim0, o.dim1) == last and o.check_dims for o in operations):
        raise _not_understood(upstream, name, form, "it keeps its name, but not its values")
    return Entry(name, (name,), (int(tensor.shape[-2]),), "transposed")


def _stored_transposed(entry: Entry, tensor: torch.Tensor, stored: Stored) -> bool:
    """As transformers decides it: by the shape on disk, so that a square matrix is taken as it is. Released checkpoints
    are transposed."""
    if not isinstance(stored, Mapping) or entry.target not in stored:
        return not stored
    shape = tuple(tensor.shape)
    return shape != tuple(stored[entry.target]) == entry.source_shape(0, shape)


def _reverted(upstream: nn.Module, form: list[Any], name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    before = getattr(upstream, "_weight_conversions", None)
    upstream._weight_conversions = form  # type: ignore[assignment]
    try:
        disk: dict[str, torch.Tensor] = revert_weight_conversion(upstream, {name: tensor})  # type: ignore[arg-type]
        return disk
    except CANNOT_REVERT as error:
        raise _not_understood(upstream, name, form, f"{type(error).__name__}: {error}") from error
    finally:
        upstream._weight_conversions = before  # type: ignore[assignment]


def _joined(name: str, disk: dict[str, torch.Tensor], shape: tuple[int, ...]) -> Entry:
    """The entry that these tensors would make; `_check_by_value` says whether it is right."""
    sources = list(disk)
    if len(shape) == 3 and len(sources) > 1 and all(t.dim() == 2 for t in disk.values()):
        sources.sort(key=_expert)  # a stable sort: the parts of an expert stay in transformers' order
        parts = sources[: len(sources) // shape[0]]
        return Entry(name, tuple(sources), tuple(int(disk[part].shape[0]) for part in parts), "experts")
    rows = tuple(int(t.shape[0]) if t.dim() else 1 for t in disk.values())
    return Entry(name, tuple(sources), rows, "rows")


def _expert(name: str) -> int:
    """The number of the expert, which is the last number in a name on disk that stands alone."""
    numbers = re.findall(r"\.(\d+)\.", name)
    return int(numbers[-1]) if numbers else 0


def _check_by_value(upstream: nn.Module, form: list[Any], entry: Entry, tensor: torch.Tensor) -> None:
    shape = [min(int(size), PROBE) for size in tensor.shape]
    small = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    disk = _reverted(upstream, form, entry.target, small)
    probe = _joined(entry.target, disk, tuple(shape))
    try:
        same = torch.equal(probe.join([disk[source] for source in probe.sources]), small)
    except RuntimeError:
        same = False
    if not same:
        raise _not_understood(upstream, entry.target, form, "the stored tensors are not its rows in order")


def _not_understood(upstream: nn.Module, name: str, form: Iterable[Any], why: str) -> PorterError:
    operations = sorted(
        {type(o).__name__ for c in _matching(form, name) for o in getattr(c, "operations", ())} or {"renaming"}
    )
    return PorterError(
        f"{type(upstream).__name__}: checkpoints store {name} through the conversion {', '.join(operations)}, which "
        f"porter cannot read ({why}); save the model with save_original_format=False and adapt that"
    )


def _matching(form: Iterable[Any], name: str) -> Iterator[Any]:
    for conversion in form:
        try:
            reverse = conversion.reverse_transform()
        except CANNOT_REVERT:
            yield conversion
            continue
        if reverse.rename_source_key(name)[1] is not None:
            yield conversion
