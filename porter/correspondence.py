"""How the weights and activations of a ported model derive from the source's.

The one table of names: it converts weights, loads original checkpoints into ported classes, pairs fused modules with
the golden tensors of their parts, and writes weights back under their original names. What it does not list
corresponds by identity.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from porter.errors import PorterError

LINEAR_PARAMETERS = ("weight", "bias", "weight_scale")
Kind = Literal["linear", "experts", "rows", "transposed"]
KINDS: tuple[Kind, ...] = ("linear", "experts", "rows", "transposed")
FIELDS = ("target", "sources", "sizes", "kind")
EXPECTED = 'expected a list like [{"target": "...", "sources": ["..."], "sizes": [1]}]'


@dataclass(frozen=True)
class Entry:
    """One ported thing made of several source things.

    kind "linear": `target` and `sources` are modules whose weight rows (and bias, per-channel scale) are concatenated,
    so outputs are concatenated on the last dimension. `sizes` are the rows of each source.

    kind "experts": `target` is a parameter [experts, rows, columns]; `sources` are the parameters of expert 0 in row
    order, then of expert 1, and so on; `sizes` are the rows of the parts of one expert.

    kind "rows": `target` and `sources` are parameters whose rows are concatenated; of one source it is another name.

    kind "transposed": `target` is a parameter whose last two dimensions are those of its one source exchanged.
    """

    target: str
    sources: tuple[str, ...]
    sizes: tuple[int, ...]
    kind: Kind = "linear"

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The ported tensor of the source `parts`, given in the order of `sources`."""
        if self.kind == "transposed":
            return parts[0].transpose(-1, -2).contiguous()
        if len(parts) == 1 and self.kind != "experts":
            return parts[0]
        if self.kind != "experts":
            return torch.cat(list(parts), dim=0)
        width = len(self.sizes)
        return torch.stack([torch.cat(list(parts[i : i + width]), dim=0) for i in range(0, len(parts), width)])

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The source tensors of a ported `tensor`, in the order of `sources`; views, not copies."""
        if self.kind == "transposed":
            return [tensor.transpose(-1, -2)]
        if len(self.sources) == 1 and self.kind != "experts":
            return [tensor]
        if self.kind != "experts":
            return list(tensor.split(list(self.sizes), dim=0))
        return [part for expert in tensor.unbind(0) for part in expert.split(list(self.sizes), dim=0)]

    def source_shape(self, index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of source number `index` of a parameter of `shape`."""
        if self.kind == "experts":
            return (self.sizes[index % len(self.sizes)], *shape[2:])
        if self.kind == "transposed":
            return (*shape[:-2], shape[-1], shape[-2])
        return shape if len(self.sources) == 1 else (self.sizes[index], *shape[1:])

    def parameters(self) -> list[tuple[str, tuple[str, ...]]]:
        """(ported parameter, source parameters) for each parameter that this entry can carry."""
        if self.kind != "linear":
            return [(self.target, self.sources)]
        return [(f"{self.target}.{p}", tuple(f"{s}.{p}" for s in self.sources)) for p in LINEAR_PARAMETERS]


@dataclass(frozen=True)
class Correspondence:
    """The entries of one ported model; see `Entry`."""

    entries: tuple[Entry, ...] = ()
    _by_target: dict[str, Entry] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._by_target.update({entry.target: entry for entry in self.entries})

    def modules(self) -> Correspondence:
        """Only the entries between modules of the upstream class: what activations need."""
        return Correspondence(tuple(e for e in self.entries if e.kind == "linear"))

    def source_of(self, ported: str) -> tuple[str, ...]:
        """The source modules (or parameters) that make up `ported`; itself where they correspond by identity."""
        entry = self._by_target.get(ported)
        if entry is not None:
            return entry.sources
        module, _, parameter = ported.rpartition(".")
        owner = self._by_target.get(module)
        if owner is not None and owner.kind == "linear" and parameter in LINEAR_PARAMETERS:
            return tuple(f"{source}.{parameter}" for source in owner.sources)
        return (ported,)

    def source_shapes(self, target: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the parameters that make up `target` of `shape`."""
        entry = self._by_target.get(target)
        if entry is None:
            return {target: shape}
        return {source: entry.source_shape(index, shape) for index, source in enumerate(entry.sources)}

    def output(self, ported: str, source_outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The golden output of the ported module `ported`, from its sources' outputs [..., rows of each]."""
        return source_outputs[0] if len(source_outputs) == 1 else torch.cat(list(source_outputs), dim=-1)

    def split_output(self, ported: str, output: torch.Tensor) -> list[torch.Tensor]:
        """The sources' outputs within `output` [..., rows] of the ported module."""
        entry = self._by_target.get(ported)
        return [output] if entry is None else list(output.split(list(entry.sizes), dim=-1))

    def convert(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The ported state dict of a source `state`."""
        rest = dict(state)
        ported = {}
        for entry in self.entries:
            for target, sources in entry.parameters():
                if all(source in rest for source in sources):
                    ported[target] = entry.join([rest.pop(source) for source in sources])
        return {**rest, **ported}

    def invert(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The source state dict of a ported `state`: exact, since joining and splitting move values unchanged."""
        rest = dict(state)
        source_state: dict[str, torch.Tensor] = {}
        for entry in self.entries:
            for target, sources in entry.parameters():
                if target in rest:
                    source_state.update(zip(sources, entry.split(rest.pop(target)), strict=True))
        return {**rest, **source_state}

    def to_json(self) -> list[dict[str, Any]]:
        """Entries as plain data, for port.json and `--correspondence FILE`."""
        return [
            {"target": e.target, "sources": list(e.sources), "sizes": list(e.sizes), "kind": e.kind}
            for e in self.entries
        ]

    @staticmethod
    def from_json(data: Any, where: str = "correspondence") -> Correspondence:
        """Read `to_json`'s data; anything else is a PorterError naming `where` it is from, the entry and the field."""
        if not isinstance(data, list):
            raise PorterError(f"{where}: holds a {type(data).__name__}; {EXPECTED}")
        first: dict[str, int] = {}
        entries = []
        for index, content in enumerate(data):
            entry = _entry(f"{where}: entry {index}", content)
            if entry.target in first:
                earlier = f"entry {first[entry.target]}"
                raise PorterError(
                    f"{where}: entry {index}: target: {entry.target!r} is that of {earlier}; name a target once"
                )
            first[entry.target] = index
            entries.append(entry)
        return Correspondence(tuple(entries))


def _entry(where: str, entry: Any) -> Entry:
    if not isinstance(entry, Mapping):
        raise PorterError(f"{where}: is a {type(entry).__name__}; {EXPECTED}")
    unknown = sorted(str(name) for name in entry if name not in FIELDS)
    if unknown:
        raise PorterError(f"{where}: {unknown[0]}: is no field of an entry; its fields are {', '.join(FIELDS)}")
    missing = [name for name in FIELDS[:3] if name not in entry]
    if missing:
        raise PorterError(f"{where}: {missing[0]}: is missing; {EXPECTED}")
    target, sources, sizes, kind = (entry.get(name, "linear") for name in FIELDS)
    if not _is_name(target):
        raise PorterError(f"{where}: target: {target!r} is no module name; name one module of the candidate")
    if not isinstance(sources, list) or not sources or not all(_is_name(source) for source in sources):
        raise PorterError(f"{where}: sources: {sources!r} is no list of module names of the golden")
    if kind not in KINDS:
        raise PorterError(f"{where}: kind: {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    if not isinstance(sizes, list) or not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise PorterError(f"{where}: sizes: {sizes!r} is no list of positive row counts, one for each source")
    if kind == "linear" and len(sizes) != len(sources):
        raise PorterError(f"{where}: sizes: {len(sizes)} for {len(sources)} sources; give the rows of each source")
    if kind == "experts" and len(sources) % len(sizes):
        raise PorterError(f"{where}: sizes: {len(sizes)} parts do not divide {len(sources)} sources; give one expert's")
    repeated, count = Counter(sources).most_common(1)[0]
    if count > 1:
        raise PorterError(f"{where}: sources: {repeated!r} is named twice; name each source once")
    return Entry(target, tuple(sources), tuple(sizes), kind)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and value == value.strip()
