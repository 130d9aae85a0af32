"""Runs of the attention Ops under the emulator, with the vendor calls that they make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from porter.kernels.ascend.catalogue.vendor_op import Call
from porter.kernels.ascend.emulator.stand_in import emulated_npu
from porter.kernels.ascend.provider import AscendProvider
from porter.kernels.registry import default_registry

FUSED, FUSED2, FUSION = (
    "npu_fused_infer_attention_score",
    "npu_fused_infer_attention_score_v2",
    "npu_fusion_attention_v3",
)


class Runs:
    """Runs Ops under the emulator of a chip, checks them against the oracle, and keeps the vendor calls."""

    def __init__(self, calls: list[Call], chip: str) -> None:
        self.calls, self._chip = calls, chip

    def ratio(self, variant: str, *arguments: Any) -> float:
        """The error of the call over the Op's bound. Raises AssertionError where the kernel refuses it."""
        name, _, kind = variant.partition("/")
        op = default_registry().op(name, kind)
        kernel = AscendProvider().implementation(name, kind, self._chip)
        assert kernel is not None
        assert (refused := kernel.accepts(*arguments)) is None, refused
        self.calls.clear()
        error = op.error(kernel.call(*arguments), op.oracle(*arguments), *arguments)
        return error / op.tolerance.relative(arguments[0].dtype, *arguments)

    def refusal(self, variant: str, *arguments: Any) -> str | None:
        """Why the kernel does not take the call."""
        kernel = AscendProvider().implementation(*variant.split("/"), self._chip)
        assert kernel is not None
        return kernel.accepts(*arguments)

    @property
    def names(self) -> list[str]:
        """The operators of the last call."""
        return [call.op.name for call in self.calls]


@contextmanager
def runs_on(chip: str) -> Iterator[Runs]:
    """Runs under the emulator of `chip`."""
    with emulated_npu(chip) as emulator:
        calls: list[Call] = []
        emulator.observers.append(lambda call, result: calls.append(call))
        yield Runs(calls, chip)
