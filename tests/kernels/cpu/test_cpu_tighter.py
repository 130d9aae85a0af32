"""Where an Op's tolerance or cases allow for what other chips round, the CPU kernels are held to less."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from porter.kernels.cpu.provider import CpuProvider
from porter.kernels.reference.linear import TOLERANCE
from porter.kernels.registry import default_registry


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_weights_cost_one_rounding(provider: CpuProvider, dtype: torch.dtype) -> None:
    """linear/w8a16 allows two: a chip without float32 scales rounds the product of the codes as well."""
    op, kernel, compared = default_registry().op("linear", "w8a16"), provider.implementation("linear", "w8a16"), 0
    assert kernel is not None
    for case in op.inputs(dtype):
        if kernel.accepts(*case.arguments) is None:
            error = op.error(kernel.call(*case.arguments), op.oracle(*case.arguments), *case.arguments)
            assert error <= TOLERANCE.relative(dtype, *case.arguments), case.label
            compared += 1
    assert compared > 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_scores_of_hundreds_from_both_parts(provider: CpuProvider, dtype: torch.dtype) -> None:
    """The Op's case takes them from the rotated part alone, since a chip may round the absorbed query."""
    key = "sparse_mla_attention", "absorbed"
    op, kernel = default_registry().op(*key), provider.implementation(*key)
    assert kernel is not None
    (case,) = [case for case in op.inputs(dtype) if case.label == "scores of hundreds"]
    nope, rope, *others = case.arguments
    large = dataclasses.replace(case, arguments=(nope * 60, rope / 200 * 60, *others)).arguments
    assert kernel.accepts(*large) is None
    error = op.error(kernel.call(*large), op.oracle(*large), *large)
    assert error <= op.tolerance.relative(dtype, *large)
