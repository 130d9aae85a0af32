"""A provider's kernel against the float64 oracle, over the Op's own cases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from porter.kernels.contract import Arguments, Implementation, Op, tensors


@dataclass(frozen=True)
class Check:
    """One generated case. `refused` is the reason why the kernel did not take it, or "" where it ran."""

    label: str
    dtype: torch.dtype
    error: float
    bound: float
    refused: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is within the bound (NaN is not). A refused case passes: the reference takes it."""
        return bool(self.refused) or self.error <= self.bound


def verify(
    op: Op, implementation: Implementation, dtypes: Iterable[torch.dtype] | None = None, device: str = "cpu"
) -> Iterator[Check]:
    """Checks of `implementation` on `device` for each of `dtypes`, by default those that the Op generates.

    The oracle runs on the CPU. An output of another shape or dtype than the reference's counts as an infinite error.
    """
    for dtype in op.dtypes if dtypes is None else dtypes:
        for case in op.inputs(dtype):
            arguments = _on(device, case.arguments)
            bound = op.tolerance.relative(dtype, *case.arguments)
            refused = implementation.accepts(*arguments)
            if refused is not None:
                yield Check(case.label, dtype, float("nan"), bound, refused)
                continue
            with torch.no_grad():
                outputs = implementation.call(*arguments)
            yield Check(case.label, dtype, _error(op, outputs, case.arguments), bound)


def _on(device: str, arguments: Arguments) -> Arguments:
    """The arguments with their tensors on `device`, strides kept."""
    return tuple(_moved(a, device) if isinstance(a, torch.Tensor) and a.device.type != device else a for a in arguments)


def _moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    storage = torch.empty(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=tensor.dtype)
    whole = storage.set_(tensor.untyped_storage(), 0, storage.shape, (1,)).to(device)
    return torch.as_strided(whole, tensor.shape, tensor.stride(), tensor.storage_offset())


def _error(op: Op, outputs: object, arguments: Arguments) -> float:
    expected = tensors(op.fake(*arguments))
    if [(t.shape, t.dtype) for t in tensors(outputs)] != [(t.shape, t.dtype) for t in expected]:
        return float("inf")
    here = outputs.cpu() if isinstance(outputs, torch.Tensor) else _on("cpu", outputs)  # type: ignore[arg-type]
    return op.error(here, op.oracle(*arguments), *arguments)
