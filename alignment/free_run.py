"""The free pass: the candidate runs whole on the golden's tokens, and every module's output is compared as it appears.

Decode steps are fed the golden's tokens (teacher forcing), so both sides stay on the same text. How much rounding
grows along the model is measured, not assumed: the source runs the same way in the candidate's precision. A module far
beyond that growth, before anything that the replay found, is a fault of state (cache, mask, position, buffer reuse).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from porter.alignment.budget import least
from porter.alignment.calls import Recorded, mapped, new_cache
from porter.alignment.lanes import natively, real
from porter.alignment.observation import first_tensor, relative, same_shape
from porter.alignment.pairing import Pair, Pairing
from porter.alignment.precision_swap import exact
from porter.alignment.replay import Replayer
from porter.alignment.routing import choice_of
from porter.alignment.sketched import sketched_error
from porter.alignment.tokens import TokenCount
from porter.golden.format import Record
from porter.golden.sketch import project

SKETCH = 509
"""Bucket sums kept of a replayed output, to tell how far the free output is from it: 3 % of the distance."""

Key = tuple[str, int]


@dataclass
class FreeErrors:
    """Per (module, step): the error against the golden, and a sketch of the output with the golden's norm."""

    end_to_end: dict[Key, float] = field(default_factory=dict)
    sketches: dict[Key, tuple[Tensor, float]] = field(default_factory=dict)
    dtypes: dict[Key, torch.dtype] = field(default_factory=dict)
    tokens: TokenCount = field(default_factory=TokenCount)
    flipped_tokens: int = 0


def sketch_of(tensor: Tensor) -> Tensor:
    """A linear sketch: the norm of a difference of sketches estimates that of the difference."""
    return project(tensor.to(torch.float32), SKETCH)


def run_whole(
    model: nn.Module,
    recorded: Recorded,
    pairs: dict[str, Pair],
    pairing: Pairing,
    names: Callable[[Pair], tuple[str, ...]],
    precision: AbstractContextManager[Any] | None = None,
) -> FreeErrors:
    """Run `model` on the recorded root inputs, step by step with its own caches, comparing as it goes.

    `names` gives the model's own names of a pair's modules: the candidate's one, or the sources. Raises what the model
    raises.
    """
    found = FreeErrors()
    watch = _Watch(recorded, pairing, found)
    caches: dict[int, Any] = {}
    config = getattr(model, "config", None)
    with torch.no_grad(), precision or nullcontext(), watch.hooked(model, pairs, names):
        for record in recorded.records.get("", []):
            if record.batch not in caches:
                caches = {record.batch: new_cache(config)}
            inputs = mapped(recorded.value(record.inputs), natively, caches[record.batch])
            watch.begin(record)
            output = model(*inputs["args"], **inputs["kwargs"])
            watch.logits(output, record)
    return found


@dataclass
class _Watch:
    """The hooks of one run."""

    recorded: Recorded
    pairing: Pairing
    found: FreeErrors
    _step: int = 0
    _keep: Tensor | None = None
    _flipped: Tensor | None = None
    _calls: dict[str, int] = field(default_factory=dict)
    _parts: dict[str, list[Tensor]] = field(default_factory=dict)

    def begin(self, record: Record) -> None:
        """A new step: counts start over, tokens are unflipped again."""
        self._step, self._calls, self._parts = record.step, {}, {}
        self._keep, self._flipped = self.recorded.keep(record), None

    @contextmanager
    def hooked(
        self, model: nn.Module, pairs: dict[str, Pair], names: Callable[[Pair], tuple[str, ...]]
    ) -> Iterator[None]:
        handles = []
        try:
            for pair in pairs.values():
                own = names(pair)
                for part, name in enumerate(own):
                    hook = self._hook(pair, part, len(own))
                    handles.append(model.get_submodule(name).register_forward_hook(hook, always_call=False))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, pair: Pair, part: int, parts: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensor = first_tensor(list(output.values()) if isinstance(output, dict) else output)
            if tensor is None or not tensor.is_floating_point():
                return
            if parts > 1:
                group = self._parts.setdefault(pair.module, [])
                group.append(tensor)
                if len(group) < parts:
                    return
                tensor = self.pairing.correspondence.output(pair.module, self._parts.pop(pair.module))
            self._compare(pair, module, tensor, output)

        return hook

    def _compare(self, pair: Pair, module: nn.Module, tensor: Tensor, output: Any) -> None:
        call = self._calls.get(pair.module, 0)
        self._calls[pair.module] = call + 1
        records = [self.recorded.at(source, self._step, call) for source in pair.sources]
        known = [record for record in records if record is not None]
        if len(known) != len(records):
            return
        if self.recorded.golden.detail != "full":
            self._compare_sketches(pair, known, tensor)
            return
        outputs = [self.recorded.golden.value(record.outputs) for record in known]
        self._note_flips(module, output, outputs[0])
        parts = [first_tensor(list(o.values()) if isinstance(o, dict) else o) for o in outputs]
        if any(part is None for part in parts):
            return
        golden = self.pairing.correspondence.output(pair.module, [part for part in parts if part is not None])
        mine, theirs = self._comparable(tensor), self._comparable(golden.to(tensor.device))
        key = (pair.module, self._step)
        error = relative(mine, theirs)
        if call == 0 or error > self.found.end_to_end[key]:
            self.found.end_to_end[key] = error
        self.found.dtypes[key] = tensor.dtype
        if call == 0:
            norm = float(real_rows(golden, self._keep).to(torch.float64).norm())
            self.found.sketches[key] = (sketch_of(real_rows(tensor, self._keep)), norm)

    def _compare_sketches(self, pair: Pair, records: list[Record], tensor: Tensor) -> None:
        parts = self.pairing.correspondence.split_output(pair.module, tensor) if len(records) > 1 else [tensor]
        error = sketched_error(self.recorded.golden, records, parts)
        key = (pair.module, self._step)
        if error is not None and error >= self.found.end_to_end.get(key, 0.0):
            self.found.end_to_end[key], self.found.dtypes[key] = error, tensor.dtype

    def _comparable(self, tensor: Tensor) -> Tensor:
        """Without padding and without tokens that already went to other experts than the golden's."""
        keep = self._keep
        if self._flipped is not None and bool((~self._flipped).any()):
            keep = ~self._flipped if keep is None or keep.shape != self._flipped.shape else keep & ~self._flipped
        return real_rows(tensor, keep)

    def _note_flips(self, module: nn.Module, output: Any, golden: Any) -> None:
        mine, _ = choice_of(module, output)
        theirs, _ = choice_of(module, golden)
        if mine is None or theirs is None or mine.experts.shape != theirs.experts.shape:
            return
        count = max(mine.count, theirs.count)
        sets = [type(c)(c.experts.cpu(), count, None).sets() for c in (mine, theirs)]
        flipped = (sets[0] != sets[1]).any(dim=1)
        self.found.flipped_tokens += int(flipped.sum())
        shape = self._shape(flipped)
        self._flipped = flipped.view(shape) if self._flipped is None else self._flipped | flipped.view(shape)

    def _shape(self, flipped: Tensor) -> tuple[int, ...]:
        record = self.recorded.at("", self._step, 0)
        tokens = None if record is None else first_tensor(self.recorded.golden.value(record.inputs, None))
        fits = tokens is not None and tokens.dim() > 1 and tokens.shape[0] * tokens.shape[1] == flipped.numel()
        return (int(tokens.shape[0]), int(tokens.shape[1])) if fits and tokens is not None else (1, flipped.numel())

    def logits(self, output: Any, record: Record) -> None:
        """Count the root's logits [B, S, vocabulary], if it returns any."""
        if self.recorded.golden.detail != "full":
            return
        golden = getattr(self.recorded.golden.value(record.outputs), "logits", None)
        mine = getattr(output, "logits", None)
        if not isinstance(golden, Tensor) or not isinstance(mine, Tensor) or golden.dim() != 3:
            return
        mine_ = same_shape(mine, golden.shape)
        if mine_ is not None:
            mine_, golden = (real_rows(t, self._keep).reshape(-1, golden.shape[-1]) for t in (mine_, golden))
            self.found.tokens.add(mine_, golden)


def real_rows(tensor: Tensor, keep: Tensor | None) -> Tensor:
    """`lanes.real`, with no mask meaning everything."""
    return tensor if keep is None else real(tensor, keep.to(tensor.device))


def limit(baselines: Sequence[FreeErrors], key: Key, dtype: torch.dtype, slack: float) -> float:
    """The end-to-end error that rounding explains: `slack` times the largest that the source itself makes."""
    grown = max((baseline.end_to_end.get(key, 0.0) for baseline in baselines), default=0.0)
    return slack * max(grown, least(dtype))


def rounded_baseline(replayer: Replayer, pairs: dict[str, Pair]) -> FreeErrors:
    """The source whole in the candidate's precision, activations rounded where the candidate's scheme rounds them."""
    source = replayer.source
    assert source is not None, "asked for only where there is a source"
    with replayer.rounding_activations(source):
        return _source_run(replayer, pairs, source, replayer.rounded(source))


def exact_baseline(replayer: Replayer, pairs: dict[str, Pair]) -> FreeErrors:
    """The source whole in float64: how far rounding took the golden itself.

    Where golden and candidate share dtype and implementation, the rounded source repeats the golden bit for bit, and
    only this run shows how rounding grows.
    """
    source = replayer.source
    assert source is not None, "asked for only where there is a source"
    return _source_run(replayer, pairs, source, exact(source))


def _source_run(
    replayer: Replayer, pairs: dict[str, Pair], source: nn.Module, precision: AbstractContextManager[Any]
) -> FreeErrors:
    return run_whole(source, replayer.recorded, pairs, replayer.pairing, lambda pair: pair.sources, precision)
