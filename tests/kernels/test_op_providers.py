"""Every kernel of every provider against the float64 oracle, over the Op's own cases and every dtype it accepts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from porter.kernels.contract import Implementation, Op, tensors
from porter.kernels.registry import DEFAULT_CHIP, default_registry


def kernels() -> list[Any]:
    registry = default_registry()
    return [
        pytest.param(op, provider.name, id=f"{provider.name}-{op.qualified}")
        for provider in registry.providers.values()
        for op in registry.ops.values()
        if provider.supported(DEFAULT_CHIP) is None and provider.implementation(op.name, op.variant) is not None
    ]


def implementation(op: Op, provider: str) -> Implementation:
    found = default_registry().providers[provider].implementation(op.name, op.variant)
    assert found is not None
    return found


@pytest.mark.parametrize(("op", "provider"), kernels())
def test_kernel_is_within_tolerance_of_the_oracle(op: Op, provider: str) -> None:
    kernel, accepted = implementation(op, provider), 0
    with torch.no_grad():
        for dtype in op.dtypes:
            for case in op.inputs(dtype):
                if kernel.accepts(*case.arguments) is not None:
                    continue
                accepted += 1
                outputs = kernel.call(*case.arguments)
                error = op.error(outputs, op.oracle(*case.arguments), *case.arguments)
                bound = op.tolerance.relative(dtype, *case.arguments)
                assert error <= bound, f"{case.label} in {dtype}: {error:.2e}, the bound is {bound:.2e}"
    assert accepted, f"{provider} accepts none of the cases of {op.name}/{op.variant}"


@pytest.mark.parametrize(("op", "provider"), kernels())
def test_kernel_outputs_have_the_shapes_and_dtypes_of_the_reference(op: Op, provider: str) -> None:
    kernel = implementation(op, provider)
    with torch.no_grad():
        for dtype in op.dtypes:
            for case in op.inputs(dtype):
                if kernel.accepts(*case.arguments) is None:
                    ours, theirs = (tensors(f(*case.arguments)) for f in (kernel.call, op.reference))
                    assert [(t.shape, t.dtype) for t in ours] == [(t.shape, t.dtype) for t in theirs], case.label


@pytest.mark.parametrize(("op", "provider"), kernels())
def test_kernel_leaves_its_inputs_alone(op: Op, provider: str) -> None:
    kernel = implementation(op, provider)
    with torch.no_grad():
        for case in op.inputs(torch.float32):
            if kernel.accepts(*case.arguments) is not None:
                continue
            before = [a.clone() if isinstance(a, torch.Tensor) else a for a in case.arguments]
            kernel.call(*case.arguments)
            for argument, copy in zip(case.arguments, before, strict=True):
                assert not isinstance(argument, torch.Tensor) or torch.equal(argument, copy), case.label


@pytest.mark.parametrize(("op", "provider"), kernels())
def test_kernel_refuses_meta_tensors_and_gives_a_reason(op: Op, provider: str) -> None:
    kernel = implementation(op, provider)
    for case in op.inputs(torch.float32):
        arguments = tuple(a.to("meta") if isinstance(a, torch.Tensor) else a for a in case.arguments)
        if any(isinstance(a, torch.Tensor) for a in arguments):
            reason = kernel.accepts(*arguments)
            assert isinstance(reason, str) and reason
