"""Running one module over its recorded calls, in float64 or in its own precision, and what is observed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from porter.alignment.calls import Call, filled_cache, mapped, new_cache
from porter.alignment.forcing import ForcedCall, Handed, Untouched, forcing
from porter.alignment.model_call import called, input_embeddings
from porter.alignment.observation import Observation, first_tensor, tensors
from porter.alignment.precision_swap import to_float64
from porter.alignment.routing import Choice, choice_of
from porter.alignment.selection import ranking, selection_of
from porter.alignment.states import States, states_of

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Change = Callable[[tuple[Any, ...], dict[str, Any]], Inputs]


@dataclass(frozen=True)
class Seen:
    """What one call showed: tensors by label, the experts it chose if it is a router, the value it returned, which
    children it called, and which of them unlike recorded."""

    tensors: Observation
    choice: Choice | None
    output: Any
    called: frozenset[str] = frozenset()
    otherwise: frozenset[str] = frozenset()
    states: States = field(default_factory=dict)
    """What the module's own cache held afterwards, where it had one."""


@dataclass(frozen=True)
class Side:
    """How one side of a pair is run.

    `real_cache`: the module itself fills the cache, kept from step to step; else each call gets one that only tells its
    length. `labels` maps the names of forced children to the candidate's, under which their inputs are observed.
    """

    module: nn.Module
    config: Any
    real_cache: bool
    source: bool
    labels: Mapping[str, str]
    explicit_mask: bool = False


def run_calls(
    side: Side,
    calls: Sequence[Call],
    convert: Callable[[Tensor], Tensor],
    precision: AbstractContextManager[Any] | None = None,
    untouched: Untouched = lambda name, child: True,
    change: Change | None = None,
) -> list[Seen]:
    """Run the module on every call, tensors passed through `convert` (which must copy). Raises CannotRun."""
    caches: dict[int, Any] = {}
    results = []
    with torch.no_grad(), precision or nullcontext():
        for call in calls:
            args, kwargs = mapped((call.args, call.kwargs), convert, _cache(side, call, caches, convert))
            if change is not None:
                args, kwargs = change(args, kwargs)
            if side.explicit_mask and not _is_recurrent(side.module):
                kwargs = with_explicit_mask(args, kwargs, call)
            recorded = call.source_forced if side.source else call.forced
            forced = {
                name: [ForcedCall(c.given, mapped(c.output, convert, None), c.run) for c in each]
                for name, each in recorded.items()
            }
            with forcing(side.module, forced, untouched, lambda name: side.labels.get(name, name)) as handed:
                with ranking(side.module) as scores:
                    output = called(side.module, *args, **kwargs)
            selected = selection_of(side.module, output, args, kwargs, scores)
            seen = seen_of(side.module, output, handed, call, selected)
            results.append(replace(seen, states=states_of(caches[call.batch])) if side.real_cache else seen)
    return results


def _cache(side: Side, call: Call, caches: dict[int, Any], convert: Callable[[Tensor], Tensor]) -> Any:
    if side.real_cache:
        if call.batch not in caches:
            caches.clear()
            caches[call.batch] = new_cache(side.config)
        return caches[call.batch]
    tensor = first_tensor([*call.args, *call.kwargs.values()])
    floating = tensor is not None and tensor.is_floating_point()
    dtype = convert(tensor[:0]).dtype if tensor is not None and floating else torch.get_default_dtype()
    return filled_cache(side.config, call, dtype)


UPDATES = re.compile(r"\bcache(_layer)?\.(update|store)\w*\(")
"""A call that appends to a cache, under transformers' names."""


def appends_to_cache(module: nn.Module) -> bool:
    """Whether the code of the module's class updates a cache or a layer of one, as that of an attention does whose
    indexer has keys of its own: it needs a cache that is filled, though a child is given the cache too."""
    try:
        return UPDATES.search(inspect.getsource(type(module))) is not None
    except (OSError, TypeError):  # a class that was made without a file
        return False


def seen_of(
    module: nn.Module,
    output: Any,
    handed: Handed,
    call: Call,
    selected: tuple[Choice | None, Observation] = (None, {}),
) -> Seen:
    """What a call of `module` showed, from its output, the keys that it `selected`, and what it handed to children."""
    choice, found = choice_of(module, output) if selected[0] is None else selected
    if choice is None:
        found = outputs_of(output)
    observed = without_padding({**handed.tensors, **found}, call.keep)
    return Seen(observed, choice, output, frozenset(handed.called), frozenset(handed.otherwise))


def outputs_of(output: Any) -> Observation:
    """The floating-point tensors of what a call returned, copied; the first is "output"."""
    return _first_is_output(
        {label: _as_real(t) for label, t in tensors(output, "output") if t.is_floating_point() or t.is_complex()}
    )


def without_padding(observed: Observation, keep: Tensor | None) -> Observation:
    """What was observed of tokens; tensors whose rows of padding cannot be told from others are left out."""
    if keep is None:
        return observed
    return {label: real(t, keep) for label, t in observed.items() if _by_token(t, keep)}


def _as_real(tensor: Tensor) -> Tensor:
    """A copy; complex numbers (rotary embeddings kept as e^i) as their two parts, in a last dimension."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().clone()


def _first_is_output(found: Observation) -> Observation:
    """The first tensor of a model output is "output", as that of a tuple is."""
    if not found or "output" in found:
        return found
    first = next(iter(found))
    return {"output" if label == first else label: tensor for label, tensor in found.items()}


def _by_token(tensor: Tensor, keep: Tensor) -> bool:
    """Whether rows of padding can be told from others: not so in [B, heads, S, ...]."""
    return tensor.dim() < 4 or tensor.shape[:2] == keep.shape


def real(tensor: Tensor, keep: Tensor) -> Tensor:
    """The rows of `tensor` ([B, S, ...] or [B * S, ...]) that are no padding; others as they are."""
    if tensor.shape[:2] == keep.shape:
        return tensor[keep]
    return tensor[keep.flatten()] if tensor.dim() and tensor.shape[0] == keep.numel() else tensor


def exactly(tensor: Tensor) -> Tensor:
    """A copy, in float64 if floating."""
    converted = to_float64(tensor)
    return converted.clone() if converted is tensor else converted


def natively(tensor: Tensor) -> Tensor:
    """A copy."""
    return tensor.detach().clone()


def with_explicit_mask(args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> dict[str, Any]:
    """`kwargs` with the mask that eager attention adds, where the recorded call left it out or gave booleans.

    Other implementations take no mask as causal; eager attention takes it as none at all.
    """
    hidden = first_tensor([*args, *kwargs.values()])
    if "attention_mask" not in kwargs or hidden is None or hidden.dim() != 3:
        return kwargs
    mask = kwargs["attention_mask"]
    if mask is None:
        queries, keys = hidden.shape[1], call.past + hidden.shape[1]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=hidden.device).tril(call.past)[None, None]
    if mask.dtype != torch.bool:
        return kwargs
    lowest = torch.finfo(hidden.dtype).min
    added = torch.zeros(mask.shape, dtype=hidden.dtype, device=hidden.device).masked_fill(~mask, lowest)
    return {**kwargs, "attention_mask": added}


def _is_recurrent(module: nn.Module) -> bool:
    """Whether a layer or its mixer is linear attention, whose mask marks padding and not the future."""
    return "linear_attention" in (getattr(module, "layer_type", None), getattr(module, "block_type", None))


def skipped_children(module: nn.Module, forced: Collection[str]) -> list[nn.Module]:
    """Forced children that have children of their own: their weights are not needed, so they keep their precision.

    Not so the embedding of tokens, which a model may call itself though it lies within a child (vision and language).
    """
    found = [module.get_submodule(name) for name in forced]
    embeddings = input_embeddings(module)
    left = [part for child in found for part in _without(child, embeddings)]
    return [child for child in left if next(child.children(), None) is not None]


def _without(module: nn.Module, part: nn.Module | None) -> list[nn.Module]:
    """`module`, or where `part` lies within it, what is beside `part`."""
    if module is part:
        return []
    if part is None or all(each is not part for each in module.modules()):
        return [module]
    return [each for child in module.children() for each in _without(child, part)]


def position_scale(calls: Sequence[Call]) -> float:
    """Angles are position times frequency: a table's last bit grows with the position."""
    highest = 1.0
    for call in calls:
        for label, tensor in tensors([call.args, call.kwargs], ""):
            if label.endswith("position_ids") or (tensor.dtype == torch.int64 and len(call.args) == 2):
                highest = max(highest, float(tensor.max())) if tensor.numel() else highest
    has_positions_alone = all(not call.forced for call in calls)
    return highest if has_positions_alone else 1.0
