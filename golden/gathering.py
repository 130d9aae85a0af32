"""The records of the ranks of one run, tensor by tensor put together to those of the whole model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from porter.errors import PorterError
from porter.golden.format import Record, dtype_of
from porter.golden.node import Node, json_text, tensor_nodes
from porter.golden.shard_layout import Rule, Way, rule_of
from porter.golden.shard_sum import combined, copies_of, distance, resolution
from porter.golden.store import Golden
from porter.golden.tensors import TensorEncoder
from porter.golden.writer import Writer

_EXPERT = re.compile(r"(.*\bexperts\.)(\d+)(\..*)?")


@dataclass
class Gathering:
    """The records of all ranks and what is found on the way."""

    goldens: Sequence[Golden]
    rules: tuple[Rule, ...]
    unequal: list[dict[str, Any]] = field(default_factory=list)
    _copies: dict[tuple[str, str], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._records = [self._named(golden, rank) for rank, golden in enumerate(self.goldens)]
        self._by_call = [{(r.module, r.step, r.call): r for r in records} for records in self._records]

    def write(self, writer: Writer) -> None:
        """Every record of the whole model, step by step."""
        batches = self.goldens[0].manifest["batches"]
        place = {batch["first_step"] + step: (batch, step) for batch in batches for step in range(batch["steps"])}
        for number in sorted(place):
            batch, step = place[number]
            if not self._given_the_same(number, batches.index(batch), step):
                continue
            encoder = TensorEncoder(writer, "full")
            for record in self._in_order(number):
                held = [calls.get((record.module, record.step, record.call)) for calls in self._by_call]
                self._write(record, [each for each in held if each is not None], writer, encoder)
            end = {name: batch[name] if step == 0 else None for name in ("tokens", "attention_mask")}
            writer.end_step(
                {"step": len(writer.ends), "past_length": step, "generated": batch["generated"][step], **end}
            )

    def _given_the_same(self, number: int, batch: int, step: int) -> bool:
        """Whether every rank went on with the same tokens; a rank that did not is listed, and the step left out."""
        fed = [golden.manifest["batches"][batch]["generated"][:step] for golden in self.goldens]
        for rank, tokens in enumerate(fed):
            if tokens != fed[0]:
                self._note(_Place("", number, []), "tokens", rank, 1.0)
        return all(tokens == fed[0] for tokens in fed)

    def _named(self, golden: Golden, rank: int) -> list[Record]:
        """The rank's records; experts that it numbers from 0 under their numbers in the whole model."""
        found = []
        for record in golden.records:
            match = _EXPERT.fullmatch(record.module)
            if match and rule_of(self.rules, record.module).local_experts:
                held = {m[2] for r in golden.records if (m := _EXPERT.fullmatch(r.module)) and m[1] == match[1]}
                name = f"{match[1]}{int(match[2]) + rank * len(held)}{match[3] or ''}"
                record = Record(**{**vars(record), "module": name})
            found.append(record)
        return found

    def _in_order(self, step: int) -> list[Record]:
        """The step's records of rank 0, and those that only others have before the module that is around them."""
        order = [record for record in self._records[0] if record.step == step and not self._omitted(record)]
        known = {(record.module, record.call) for record in order}
        for records in self._records[1:]:
            for record in (each for each in records if each.step == step and not self._omitted(each)):
                if (record.module, record.call) not in known:
                    known.add((record.module, record.call))
                    around = (i for i, each in enumerate(order) if _contains(each.module, record.module))
                    order.insert(next(around, len(order)), record)
        return order

    def _omitted(self, record: Record) -> bool:
        return rule_of(self.rules, record.module).omit

    def omitted(self) -> list[str]:
        """The modules that are left out."""
        return list(dict.fromkeys(r.module for records in self._records for r in records if self._omitted(r)))

    def _write(self, record: Record, held: list[Record], writer: Writer, encoder: TensorEncoder) -> None:
        rule = rule_of(self.rules, record.module)
        owners = [i for i, calls in enumerate(self._by_call) if (record.module, record.step, record.call) in calls]
        place = _Place(record.module, record.step, owners)
        if len(held) not in (1, len(self.goldens)):
            raise PorterError(f"{record.module}: recorded by ranks {owners} alone; give the others or leave it out")
        counter = iter(range(1 << 30))
        inputs = self._node([each.inputs for each in held], lambda: rule.inputs, place, "inputs", encoder)
        outputs = self._node([each.outputs for each in held], lambda: rule.way(next(counter)), place, "output", encoder)
        resolved = encoder.resolved(inputs), encoder.resolved(outputs)
        writer.record(len(writer.ends), record.call, record.module, record.kind, *resolved, record.batch)

    def _node(
        self, nodes: Sequence[Node], way: Callable[[], Way], place: _Place, side: str, encoder: TensorEncoder
    ) -> str:
        first = nodes[0]
        if "tensor" in first:
            if not all("tensor" in node for node in nodes):
                raise PorterError(f"{place.module}: {side} is a tensor on some ranks only; record the ranks alike")
            return encoder(self._tensor(nodes, way(), place, side))
        for kind in ("list", "tuple"):
            if kind in first:
                rows = zip(*(node[kind] for node in nodes), strict=True)
                return f'{{"{kind}": [{", ".join(self._node(row, way, place, side, encoder) for row in rows)}]}}'
        if "dict" in first:
            fields = (
                f"{json_text(name)}: {self._node([node['dict'][name] for node in nodes], way, place, side, encoder)}"
                for name in first["dict"]
            )
            named = f', "class": {json_text(first["class"])}' if first.get("class") else ""
            return f'{{"dict": {{{", ".join(fields)}}}{named}}}'
        return json_text(first)

    def _tensor(self, nodes: Sequence[Node], way: Way, place: _Place, side: str) -> Tensor:
        goldens = [self.goldens[index] for index in place.owners]
        tensors = [golden.tensor(node["tensor"]) for golden, node in zip(goldens, nodes, strict=True)]
        if len(tensors) == 1 or (way != "sum" and len({node["digest"] for node in nodes}) == 1):
            return tensors[0]
        floating = tensors[0].is_floating_point()
        if way == "replicated" or not floating or self._whole_already(tensors[0], way):
            return self._whole(tensors, place, side)
        alike = all(distance(tensor, tensors[0]) <= resolution(tensors[0].dtype) for tensor in tensors)
        if way == "reduced" and (alike or not self._sum_taken(place)):
            return tensors[0]
        if isinstance(way, Mapping) and "concat" in way:
            copies = way.get("copies") or self._held_copies(place.module, side)
            groups = [tensors[start : start + copies] for start in range(0, len(tensors), copies)]
            tensors = [self._whole(group, place, side, number * copies) for number, group in enumerate(groups)]
        try:
            return combined(tensors, way)
        except (RuntimeError, IndexError) as error:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
            raise PorterError(
                f"{place.module}: {side} tensors {shapes} cannot be put together as {way}; say how with --layout"
            ) from error

    def _whole_already(self, tensor: Tensor, way: Way) -> bool:
        """Whether every rank holds all of what could have been spread, by its size in the config."""
        config = self.goldens[0].manifest["model"]["config"] or {}
        size = config.get(way.get("whole")) if isinstance(way, Mapping) else None
        return size is not None and tensor.dim() > 0 and tensor.shape[-1] == size

    def _held_copies(self, module: str, side: str) -> int:
        """How many neighbours hold the same part, in every call of the module."""
        key = module, side
        if key not in self._copies:
            digests = [list(_digests(records, module, side)) for records in self._records]
            self._copies[key] = copies_of(digests)
        return self._copies[key]

    def _whole(self, tensors: Sequence[Tensor], place: _Place, side: str, begin: int = 0) -> Tensor:
        """The tensor that every rank should hold; those that hold another are listed."""
        if len({(tensor.shape, tensor.dtype) for tensor in tensors}) > 1:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
            raise PorterError(f"{place.module}: {side} tensors are {shapes} on the ranks; say how with --layout")
        alike = [[distance(a, b) <= resolution(a.dtype) for b in tensors] for a in tensors]
        votes = Counter({index: sum(row) for index, row in enumerate(alike)})
        kept = votes.most_common(1)[0][0]
        for index, tensor in enumerate(tensors):
            if not alike[kept][index]:
                self._note(place, side, begin + index, distance(tensor, tensors[kept]))
        return tensors[kept]

    def _note(self, place: _Place, side: str, rank: int, error: float) -> None:
        """Once for a module, side and rank: the first time."""
        key = {"module": place.module, "side": side, "rank": rank}
        if not any(key.items() <= known.items() for known in self.unequal):
            self.unequal.append({**key, "step": place.step, "error": error})

    def _sum_taken(self, place: _Place) -> bool:
        """Whether partial sums were added up: the module around them, which is whole on every rank, shows it.

        Only modules of a layer show it: what the model's body returns has passed every other sum as well.
        """
        name = place.module.rpartition(".")[0]
        while any(part.isdigit() for part in name.split(".")):
            held = [calls.get((name, place.step, 0)) for calls in self._by_call]
            if all(held) and rule_of(self.rules, name).way(0) == "replicated":
                first = [next(_floating(record.outputs), None) for record in held if record is not None]
                return len({node["digest"] for node in first if node is not None}) <= 1
            name = name.rpartition(".")[0]
        return True


@dataclass(frozen=True)
class _Place:
    """What is put together: a module's call in a step, and the ranks that recorded it."""

    module: str
    step: int
    owners: list[int]


def _contains(around: str, module: str) -> bool:
    return not around or module.startswith(f"{around}.")


def _digests(records: Sequence[Record], module: str, side: str) -> Iterator[str]:
    for record in records:
        if record.module == module:
            node: Any = record.inputs if side == "inputs" else record.outputs
            yield from (each["digest"] for each in _floating(node))


def _floating(node: Node) -> Iterator[Node]:
    return (each for each in tensor_nodes(node) if dtype_of(each["dtype"]).is_floating_point)
