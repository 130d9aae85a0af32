"""The recorded calls of one pair, ready to be replayed: arguments in the candidate's dtype, forced children, caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from porter.alignment.forcing import MASK_NAME, ForcedCall
from porter.alignment.model_call import called
from porter.alignment.observation import MASK_BELOW, first_tensor, is_mask
from porter.alignment.pairing import Pair, Pairing, relative_name
from porter.golden.format import Record, dtype_of
from porter.golden.node import Node, decode, tensor_nodes
from porter.golden.store import Golden


class CacheSlot:
    """Stands for a key-value cache in recorded arguments."""


SLOT = CacheSlot()


@dataclass(frozen=True)
class Call:
    """One recorded call: `keep` marks the real (not padding) positions [B, S], `past` the tokens in the cache before.

    `forced` and `source_forced` hold the recorded calls of the children, by the name that either side knows them by.
    """

    step: int
    batch: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    past: int = 0
    keep: Tensor | None = None
    forced: Mapping[str, Sequence[ForcedCall]] = field(default_factory=dict)
    source_forced: Mapping[str, Sequence[ForcedCall]] = field(default_factory=dict)


@dataclass
class Recorded:
    """The records of a golden by module, and the decoding of their values in the dtype of a candidate.

    `native_dtypes` says, for tensors that the source keeps in another dtype than the model's (a router's float32
    scores), which one: replaying fills it in, producers before consumers.
    """

    golden: Golden
    dtype: torch.dtype
    device: torch.device
    native_dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    returns_tuple: dict[str, bool] = field(default_factory=dict)
    """Of candidate modules replayed so far."""

    def __post_init__(self) -> None:
        self.records: dict[str, list[Record]] = {}
        for record in self.golden.records:
            self.records.setdefault(record.module, []).append(record)
        self._index = {(r.module, r.step, r.call): r for r in self.golden.records}
        name = self.golden.manifest["dtype"]
        self.recorded_dtype = torch.float32 if name is None else dtype_of(name)

    def value(self, node: Node) -> Any:
        """The Python value, tensors in the candidate's dtype, caches as SLOT. PorterError for what was not stored."""
        return decode(node, self._tensor, SLOT)

    def _tensor(self, node: Node) -> Tensor:
        tensor: Tensor = self.golden.value(node)
        if tensor.is_floating_point() and tensor.dtype == self.recorded_dtype:
            tensor = cast(tensor, self.native_dtypes.get(node["tensor"], self.dtype))
        return tensor.to(self.device)

    def note_dtypes(self, record: Record, outputs: Sequence[Tensor]) -> None:
        """Remember in which dtype the source, run in the candidate's dtype, produced the tensors of `record`."""
        nodes = list(tensor_nodes(record.outputs))
        if len(nodes) == len(outputs):
            for node, tensor in zip(nodes, outputs, strict=True):
                if tensor.is_floating_point():
                    self.native_dtypes[node["tensor"]] = tensor.dtype

    def calls(self, pair: Pair, pairing: Pairing) -> list[Call]:
        """Every recorded call of the pair, in order."""
        records = [self.records[source] for source in pair.sources]
        past: dict[int, int] = {}
        found = []
        for parts in zip(*records, strict=False):
            call = self._call(pair, pairing, parts)
            tokens = length(call.args, call.kwargs)
            found.append(replace(call, past=past.get(call.batch, 0), keep=self.keep(parts[0])))
            past[call.batch] = past.get(call.batch, 0) + tokens
        return found

    def _call(self, pair: Pair, pairing: Pairing, parts: Sequence[Record]) -> Call:
        record = parts[0]
        inputs = self.value(record.inputs)
        output = self.value(record.outputs)
        if len(parts) > 1:
            output = pairing.correspondence.output(pair.module, [self.value(part.outputs) for part in parts])
        forced: dict[str, list[ForcedCall]] = {}
        source_forced: dict[str, list[ForcedCall]] = {}
        for child in pairing.children(pair):
            by_source = [self._forced(child_calls(self, record, source)) for source in child.sources]
            if not all(by_source):
                continue
            name = relative_name(child.module, pair.module)
            forced[name] = [self._joined(child, pairing, group) for group in zip(*by_source, strict=False)]
            if len(pair.sources) == 1:
                for source, calls in zip(child.sources, by_source, strict=True):
                    source_forced[relative_name(source, pair.sources[0])] = calls
        return Call(
            record.step,
            record.batch,
            tuple(inputs["args"]),
            inputs["kwargs"],
            output,
            forced=forced,
            source_forced=source_forced,
        )

    def _forced(self, records: Sequence[Record]) -> list[ForcedCall]:
        return [ForcedCall(shapes_handed(record), self.value(record.outputs)) for record in records]

    def _joined(self, child: Pair, pairing: Pairing, calls: Sequence[ForcedCall]) -> ForcedCall:
        if len(calls) == 1:
            output = calls[0].output
        else:
            output = pairing.correspondence.output(child.module, [call.output for call in calls])
        known = self.returns_tuple.get(child.module)
        return ForcedCall(calls[0].given, output, known is not None and known != isinstance(output, tuple))

    def at(self, module: str, step: int, call: int) -> Record | None:
        """The record of one call of a module, None where it was not recorded."""
        return self._index.get((module, step, call))

    def keep(self, record: Record) -> Tensor | None:
        """Which positions [B, S] of the record's step hold tokens; None where all do."""
        batch = self.golden.batches[record.batch] if record.batch < len(self.golden.batches) else None
        if batch is None or batch.attention_mask is None or record.step != batch.first_step:
            return None
        mask = batch.attention_mask.bool()
        return None if bool(mask.all()) else mask.to(self.device)

    def holds_cache(self, module: str) -> bool:
        """Whether the recorded module was called with a key-value cache."""
        return _holds_cache(self.records[module][0].inputs)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`; the large negative numbers of a mask stay finite."""
    if is_mask(tensor):
        limits, own = torch.finfo(dtype), torch.finfo(tensor.dtype)
        finite = tensor.clamp(max(limits.min, own.min), min(limits.max, own.max)).to(dtype)
        return torch.where(tensor == -torch.inf, torch.tensor(-torch.inf, dtype=dtype, device=tensor.device), finite)
    return tensor.to(dtype)


def mapped(value: Any, change: Callable[[Tensor], Tensor], cache: Any = SLOT) -> Any:
    """`value` with `change` applied to every tensor and `cache` in place of every SLOT; containers are new."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, CacheSlot):
        return cache
    if isinstance(value, dict):
        changed = {key: mapped(item, change, cache) for key, item in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, list | tuple):
        return type(value)([mapped(item, change, cache) for item in value])
    return value


def length(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """How many tokens a call adds to the cache: dimension 1 of its first tensor."""
    tensor = first_tensor([*args, *kwargs.values()])
    return int(tensor.shape[1]) if tensor is not None and tensor.dim() > 1 else 0


def child_calls(recorded: Recorded, parent: Record, child: str) -> list[Record]:
    """The child's records within one call of the parent; none where they cannot be told apart."""
    siblings = [record for record in recorded.records[parent.module] if record.step == parent.step]
    calls = [record for record in recorded.records.get(child, []) if record.step == parent.step]
    share, rest = divmod(len(calls), len(siblings))
    return [] if rest else calls[parent.call * share : (parent.call + 1) * share]


def shapes_handed(record: Record) -> tuple[tuple[int, ...], ...]:
    """The shapes of `forcing.handed(...)` of a recorded call, from the nodes alone."""
    inputs = record.inputs["dict"]
    nodes = [inputs["args"], *(node for name, node in inputs["kwargs"]["dict"].items() if MASK_NAME not in name)]
    found = [node for each in nodes for node in tensor_nodes(each)]
    floating = [node for node in found if dtype_of(node["dtype"]).is_floating_point and not _mask_node(node)]
    return tuple(tuple(node["shape"]) for node in floating)


def _mask_node(node: Node) -> bool:
    lowest = node["stats"].get("min")
    masked = bool(node["stats"].get("inf")) or (lowest is not None and lowest < MASK_BELOW)
    return len(node["shape"]) == 4 and masked


def _holds_cache(node: Node) -> bool:
    if "cache" in node:
        return True
    children = [*(node.get("list") or ()), *(node.get("tuple") or ()), *(node.get("dict") or {}).values()]
    return any(_holds_cache(child) for child in children)


def new_cache(config: Any) -> Any:
    """An empty cache of the kind that `config` asks for."""
    from transformers import DynamicCache

    return DynamicCache() if config is None else called(DynamicCache, config=config)


def cache_after(output: Any, cache: Any) -> Any:
    """The cache of the next step: the one that the model made where it was called without any, else `cache`."""
    from transformers.cache_utils import Cache

    # Not through the attribute, which warns of the older name.
    name = "cache" if isinstance(output, dict) and "cache" in output else "past_key_values"
    made = dict.get(output, name) if isinstance(output, dict) else None
    return made if isinstance(made, Cache) else cache


def filled_cache(config: Any, call: Call, dtype: torch.dtype) -> Any:
    """A cache that says it holds `call.past` tokens: what a parent whose layers are forced asks it for."""
    cache = new_cache(config)
    if call.past:
        tensor = first_tensor([*call.args, *call.kwargs.values()])
        rows = 1 if tensor is None else tensor.shape[0]
        zeros = torch.zeros(rows, 1, call.past, 1, dtype=dtype)
        # Layers of recurrent states hold no keys and tell no length.
        for index in [i for i, each in enumerate(cache.layers) if hasattr(each, "update")] if cache.layers else [0]:
            called(cache.update, zeros, zeros, index)
    return cache


def source_module(model: nn.Module, pair: Pair) -> nn.Module:
    """The source of a pair: the module itself, or a group that concatenates the outputs of several."""
    if len(pair.sources) == 1:
        return model.get_submodule(pair.sources[0])
    return SourceGroup({source.rpartition(".")[2]: model.get_submodule(source) for source in pair.sources})


class SourceGroup(nn.Module):
    """Source modules that a candidate fuses into one: all get the same input, outputs are concatenated [..., rows]."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.cat([called(part, *args, **kwargs) for part in self.children()], dim=-1)
