"""Replaying a parent with its children's outputs given, so that only what the parent itself does is measured.

A forced child does not run where it is called as it was recorded; its recorded output is returned. Where the candidate
calls it otherwise (a norm that is given the residual to add), it runs, and the recorded tensor replaces the first of
its results. What the parent hands to its children is observed: that is where its own mistakes show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from porter.alignment.model_call import called
from porter.alignment.observation import Observation, is_mask, tensors
from porter.alignment.streaming import present

MASK_NAME = "mask"
"""In the name of an argument: implementations of attention differ in the masks that they ask for."""


@dataclass(frozen=True)
class ForcedCall:
    """One call of a child as recorded: the shapes of the floating-point tensors it was given, and its output.

    `run`: run the child all the same and replace its first tensor, because its result is built otherwise.
    """

    given: tuple[tuple[int, ...], ...]
    output: Any
    run: bool = False


@dataclass(frozen=True)
class Handed:
    """What a parent handed to its children, and how often it called each; `otherwise`: unlike recorded."""

    tensors: Observation
    called: dict[str, int]
    otherwise: set[str]


Untouched = Callable[[str, nn.Module], bool]
"""Whether the child of that name (relative to the parent) is as it was, so that forcing it is right."""

Forced = Mapping[str, Sequence[ForcedCall]]
"""Calls in order, by the child's name relative to the parent."""


def handed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The floating-point tensors given to a call, in order, without attention masks."""
    named = [value for name, value in kwargs.items() if MASK_NAME not in name]
    found = [tensor for _, tensor in tensors([*args, *named], "")]
    return [tensor for tensor in found if tensor.is_floating_point() and not is_mask(tensor)]


@contextmanager
def forcing(
    module: nn.Module,
    forced: Forced,
    untouched: Untouched = lambda name, child: True,
    label: Callable[[str], str] = lambda name: name,
) -> Iterator[Handed]:
    """Force the children while the context lasts; yields what they are handed, as "<label(child)>.input".

    A child for which `untouched` is False runs on what it is given and is only observed.
    """
    seen = Handed({}, {}, set())
    replaced: list[tuple[nn.Module, bool, Any]] = []
    try:
        for name, calls in forced.items():
            child = module.get_submodule(name)
            replaced.append((child, "forward" in child.__dict__, child.__dict__.get("forward")))
            calls_left = calls if untouched(name, child) else ()
            child.__dict__["forward"] = _forced(_awake(child), name, label(name), calls, calls_left, seen)
        yield seen
        seen.otherwise.update(name for name in seen.called if seen.called[name] != len(forced[name]))
    finally:
        for child, had, before in reversed(replaced):
            if had:
                child.__dict__["forward"] = before
            else:
                child.__dict__.pop("forward", None)


def _awake(child: nn.Module) -> Callable[..., Any]:
    """The child's forward, with its weights in memory while it runs: what is forced may be on disk."""
    original = child.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with present(child):
            return called(original, *args, **kwargs)

    return forward


def _forced(
    original: Callable[..., Any],
    name: str,
    label: str,
    recorded: Sequence[ForcedCall],
    forced: Sequence[ForcedCall],
    seen: Handed,
) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        call = seen.called.get(name, 0)
        seen.called[name] = call + 1
        given = handed(args, kwargs)
        shapes = tuple(tuple(tensor.shape) for tensor in given)
        known = recorded[call].given if call < len(recorded) else ()
        as_recorded = call < len(recorded) and shapes == known
        fused = len(shapes) > len(known) > 0 and shapes[0] == known[0]
        if not as_recorded and not fused:
            seen.otherwise.add(name)
        if as_recorded:
            for index, tensor in enumerate(given):
                seen.tensors[input_label(label, call, index)] = tensor.detach().clone()
        if call >= len(forced) or name in seen.otherwise:
            return called(original, *args, **kwargs)
        if as_recorded and not forced[call].run:
            return forced[call].output
        return _replace_first(called(original, *args, **kwargs), forced[call].output)

    return forward


def input_label(label: str, call: int, index: int) -> str:
    """The label of the `index`-th tensor handed to a child in its `call`-th call."""
    return f"{label}.input" + (f"#{call}" if call else "") + (f".{index}" if index else "")


def _replace_first(output: Any, given: Any) -> Any:
    """`output` with its first tensor replaced by the first tensor of `given`."""
    first = next((tensor for _, tensor in tensors(given, "")), None)
    if isinstance(output, Tensor) and first is not None:
        return first
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor) and first is not None:
        return (first, *output[1:])
    return output
