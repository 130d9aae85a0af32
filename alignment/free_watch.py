"""What hooks see in a run of a whole model: every module's output, input, positions and masks, against the golden's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from porter.alignment.calls import Recorded
from porter.alignment.handed import Otherwise, otherwise
from porter.alignment.lanes import real
from porter.alignment.observation import first_tensor, relative, same_shape
from porter.alignment.pairing import Pair, Pairing
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
    """Per (module, step): the error of its output against the golden's, and what is needed to judge it.

    `inputs`: the largest error of what it was given, up to this step, every token counted: a module that keeps state
    inherits from earlier steps, and from tokens that went to other experts. `handed`: positions and masks unlike the
    golden's.
    """

    end_to_end: dict[Key, float] = field(default_factory=dict)
    inputs: dict[Key, float] = field(default_factory=dict)
    sketches: dict[Key, tuple[Tensor, float]] = field(default_factory=dict)
    dtypes: dict[Key, torch.dtype] = field(default_factory=dict)
    handed: dict[Key, list[Otherwise]] = field(default_factory=dict)
    tokens: TokenCount = field(default_factory=TokenCount)
    flipped_tokens: int = 0


def sketch_of(tensor: Tensor) -> Tensor:
    """A linear sketch: the norm of a difference of sketches estimates that of the difference."""
    return project(tensor.to(torch.float32), SKETCH)


@dataclass
class Watch:
    """The hooks of one run."""

    recorded: Recorded
    pairing: Pairing
    found: FreeErrors
    _step: int = 0
    _keep: Tensor | None = None
    _flipped: Tensor | None = None
    _calls: dict[str, int] = field(default_factory=dict)
    _entered: dict[str, int] = field(default_factory=dict)
    _parts: dict[str, list[Tensor]] = field(default_factory=dict)
    _inherits: dict[str, float] = field(default_factory=dict)

    def begin(self, record: Record, first_of_batch: bool) -> None:
        """A new step: counts start over, tokens are unflipped again."""
        self._step, self._calls, self._entered, self._parts = record.step, {}, {}, {}
        self._keep, self._flipped = self.recorded.keep(record), None
        if first_of_batch:
            self._inherits = {}

    @contextmanager
    def hooked(
        self, model: nn.Module, pairs: dict[str, Pair], names: Callable[[Pair], tuple[str, ...]]
    ) -> Iterator[None]:
        """Watch the modules that `names` gives for every pair."""
        handles = []
        try:
            for pair in pairs.values():
                own = names(pair)
                if self.recorded.golden.detail == "full":
                    entering = self._entering(pair)
                    handles.append(model.get_submodule(own[0]).register_forward_pre_hook(entering, with_kwargs=True))
                for part, name in enumerate(own):
                    hook = self._hook(pair, part, len(own))
                    handles.append(model.get_submodule(name).register_forward_hook(hook, always_call=False))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, pair: Pair) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = self._entered.get(pair.module, 0)
            self._entered[pair.module] = call + 1
            record = self.recorded.at(pair.sources[0], self._step, call)
            if record is None:
                return
            golden = self.recorded.value(record.inputs)
            key = (pair.module, self._step)
            wrong = list(otherwise(args, kwargs, golden, self._keep, "Rotary" in record.kind))
            if wrong:
                self.found.handed.setdefault(key, []).extend(wrong)
            mine, theirs = (
                _floating([*args, *kwargs.values()]),
                _floating([*golden["args"], *golden["kwargs"].values()]),
            )
            if mine is None or theirs is None or same_shape(mine, theirs.shape) is None:
                return
            error = relative(real_rows(mine, self._keep), real_rows(theirs.to(mine.device), self._keep))
            self._inherits[pair.module] = max(error, self._inherits.get(pair.module, 0.0))
            self.found.inputs[key] = self._inherits[pair.module]

        return hook

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
        flipped = self._flipped is not None and bool(self._flipped.any())
        if _holds_nothing(module) and (flipped or same_shape(tensor, golden.shape) is None):
            # An activation is called as its parent likes, on whichever tokens an expert has: the parent is compared.
            return
        mine, theirs = self._comparable(tensor), self._comparable(golden.to(tensor.device))
        key = (pair.module, self._step)
        error = relative(mine, theirs)
        if not error <= self.found.end_to_end.get(key, -1.0):
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
        flipped = None if mine is None or theirs is None else mine.flipped(theirs)
        if flipped is None:
            return
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


def _holds_nothing(module: nn.Module) -> bool:
    return next(module.parameters(), None) is None and next(module.buffers(), None) is None


def _floating(value: Any) -> Tensor | None:
    tensor = first_tensor(value)
    return tensor if tensor is not None and tensor.is_floating_point() else None


def real_rows(tensor: Tensor, keep: Tensor | None) -> Tensor:
    """`lanes.real`, with no mask meaning everything."""
    return tensor if keep is None else real(tensor, keep.to(tensor.device))
