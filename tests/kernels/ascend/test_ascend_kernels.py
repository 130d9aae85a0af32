"""Every Ascend kernel over its Op's own cases, under the emulator, against the float64 oracle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from porter.kernels.ascend.catalogue.vendor_op import A2
from porter.kernels.ascend.emulator.stand_in import Emulator, emulated_npu
from porter.kernels.ascend.provider import KERNELS, AscendProvider
from porter.kernels.registry import default_registry
from porter.kernels.verification import verify


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with emulated_npu(A2) as active:
        yield active


@pytest.mark.parametrize("key", KERNELS, ids="/".join)
def test_kernel_is_within_its_ops_tolerance(key: tuple[str, str], emulator: Emulator) -> None:
    op = default_registry().op(*key)
    kernel = AscendProvider().implementation(*key, A2)
    assert kernel is not None
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
