"""Every Ascend kernel over its Op's own cases, under the emulator, against the float64 oracle."""

from __future__ import annotations

import pytest
import torch

from porter.kernels.ascend.catalogue.vendor_op import A2, A5
from porter.kernels.ascend.emulator.stand_in import emulated_npu
from porter.kernels.ascend.provider import KERNELS, AscendProvider
from porter.kernels.registry import default_registry
from porter.kernels.verification import verify

DOCUMENTED_FOR = {"hyper_connection": A5}
"""The chip of Ops whose vendor operators are documented for it alone."""


@pytest.mark.parametrize("key", KERNELS, ids="/".join)
def test_kernel_is_within_its_ops_tolerance(key: tuple[str, str]) -> None:
    op, chip = default_registry().op(*key), DOCUMENTED_FOR.get(key[0], A2)
    kernel = AscendProvider().implementation(*key, chip)
    assert kernel is not None
    with emulated_npu(chip):
        checks = list(verify(op, kernel, [d for d in op.dtypes if d != torch.float64]))
    wrong = [c for c in checks if not c.passed]
    assert not wrong, wrong[0]
    assert any(not c.refused for c in checks if c.dtype == torch.bfloat16), checks[0].refused


@pytest.mark.parametrize("key", KERNELS, ids="/".join)
def test_kernel_refuses_tensors_that_are_not_on_an_npu(key: tuple[str, str]) -> None:
    kernel = AscendProvider().implementation(*key, A2)
    assert kernel is not None
    case = next(iter(default_registry().op(*key).inputs(torch.bfloat16)))
    assert kernel.accepts(*case.arguments) == "a tensor is not on npu"
