"""Calls of npu operators as JSON: what one process made under the emulator, another replays on the wheel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from porter.kernels.ascend.catalogue.vendor_op import Call
from porter.kernels.ascend.emulator.stand_in import emulated_npu
from porter.kernels.ascend.provider import KERNELS, AscendProvider
from porter.kernels.registry import default_registry

Recorded = dict[str, Any]
"""op, chip, arguments by name, outputs, source (where the call was first seen)."""


@dataclass
class Recorder:
    """An observer of the emulator that keeps each distinct call once; `source` names what runs at present."""

    source: str = ""
    _calls: dict[str, Recorded] = field(default_factory=dict)

    def __call__(self, call: Call, result: Any) -> None:
        entry = {
            "op": call.op.name,
            "chip": call.chip,
            "arguments": {name: encoded(value) for name, value in call.arguments.items()},
            "outputs": [encoded(t) for t in listed(result)],
        }
        self.add([{**entry, "source": self.source}])

    def add(self, calls: list[Recorded]) -> None:
        """Keep those of `calls` that are new."""
        for call in calls:
            key = json.dumps({name: value for name, value in call.items() if name != "source"}, sort_keys=True)
            self._calls.setdefault(key, call)

    @property
    def calls(self) -> list[Recorded]:
        """The distinct calls in the order in which they were first made."""
        return list(self._calls.values())


def record_kernels(recorder: Recorder, chip: str) -> Iterator[str]:
    """Run every kernel of the provider on `chip` over its Op's own cases; yields a line for each kernel that failed."""
    registry, provider = default_registry(), AscendProvider()
    with emulated_npu(chip) as emulator, torch.no_grad():
        emulator.observers.append(recorder)
        for key in KERNELS:
            recorder.source = f"kernel {'/'.join(key)}"
            op, kernel = registry.op(*key), provider.implementation(*key, chip)
            assert kernel is not None, key
            for case in (case for dtype in op.dtypes for case in op.inputs(dtype)):
                try:
                    if kernel.accepts(*case.arguments) is None:
                        kernel.call(*case.arguments)
                except Exception as error:
                    yield f"{recorder.source} on {chip}, case {case.label}: {type(error).__name__}: {error}"
                    break


def listed(outputs: Any) -> list[torch.Tensor]:
    """The tensors of an operator's result, in order."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return [t for t in outputs or () if isinstance(t, torch.Tensor)]


def encoded(value: Any) -> Any:
    """A value as JSON: tensors by shape, strides and dtype alone."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"shape": list(value.shape), "stride": list(value.stride()), "dtype": dtype}
    if isinstance(value, (list, tuple)):
        return [encoded(v) for v in value]
    if isinstance(value, torch.dtype):
        return {"torch": str(value).removeprefix("torch.")}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} is no argument of an npu operator")


def decoded(value: Any, device: str) -> Any:
    """The value again, its tensors empty on `device`."""
    if isinstance(value, list):
        return [decoded(v, device) for v in value]
    if isinstance(value, dict) and "torch" in value:
        return getattr(torch, value["torch"])
    if isinstance(value, dict):
        dtype = getattr(torch, value["dtype"])
        return torch.empty_strided(value["shape"], value["stride"], dtype=dtype, device=device)
    return value
