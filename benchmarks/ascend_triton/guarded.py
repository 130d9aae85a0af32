"""Memory of a launch's tensors in which a read or write outside of them shows.

Floats beyond a tensor, and between its rows, are NaN, so what reads them becomes NaN; outputs begin as NaN, so what is
never written stays so; and after the launches everything beyond the tensors, and the inputs, must be as before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from porter.kernels.triton.launch import Launch, Plan

MARGIN = 4096
"""Elements on either side of a tensor."""


class WroteOutside(AssertionError):
    """A kernel changed memory that is not its own to write; the message says which."""


@dataclass(frozen=True)
class _Guarded:
    """`tensor` is a copy within `memory`; `before` is `memory` as it was, None for outputs' own elements."""

    name: str
    tensor: torch.Tensor
    memory: torch.Tensor
    before: torch.Tensor
    output: bool


class GuardedPlan:
    """A plan whose launches work on guarded copies of its tensors."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._guarded: dict[int, _Guarded] = {}
        written = {tensor.data_ptr() for launch in plan.launches for tensor in launch.written()}
        self.launches = [self._copied(launch, written) for launch in plan.launches]

    def _copied(self, launch: Launch, written: set[int]) -> Launch:
        tensors = {name: value for name, value in launch.arguments.items() if isinstance(value, torch.Tensor)}
        for name, tensor in tensors.items():
            address = tensor.data_ptr()
            if address not in self._guarded:
                self._guarded[address] = _guard(name, tensor, address in written)
        moved = {name: self._guarded[tensor.data_ptr()].tensor for name, tensor in tensors.items()}
        return replace(launch, arguments={**launch.arguments, **moved})

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """The outputs after the launches. Raises WroteOutside where anything else has changed."""
        for guarded in self._guarded.values():
            _check(guarded)
        for output in self._plan.outputs:
            if (copy := self._guarded.get(output.data_ptr())) is not None:
                output.copy_(copy.tensor.reshape(output.shape))
        return self._plan.outputs


def _guard(name: str, tensor: torch.Tensor, output: bool) -> _Guarded:
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    poison = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
    memory = torch.full((span + 2 * MARGIN,), poison, dtype=tensor.dtype)
    copy = memory.as_strided(tensor.shape, tensor.stride(), MARGIN)
    if not output:
        # Elements of expanded dimensions share memory, and all have the same value.
        torch.as_strided(memory, *_distinct(tensor), MARGIN).copy_(tensor.as_strided(*_distinct(tensor)))
    return _Guarded(name, copy, memory, memory.clone(), output)


def _distinct(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    """Sizes and strides without repetition along dimensions of stride 0."""
    strides = list(tensor.stride())
    return [1 if stride == 0 else size for size, stride in zip(tensor.shape, strides, strict=True)], strides


def _check(guarded: _Guarded) -> None:
    after = guarded.memory.clone()
    if guarded.output:
        inside = torch.zeros(after.shape, dtype=torch.bool)
        inside.as_strided(guarded.tensor.shape, guarded.tensor.stride(), MARGIN).fill_(True)
        after[inside] = guarded.before[inside]
    changed = (after.view(torch.uint8) != guarded.before.view(torch.uint8)).any()
    if changed:
        where = "outside of" if guarded.output else "in or about"
        raise WroteOutside(f"wrote {where} {guarded.name}")
