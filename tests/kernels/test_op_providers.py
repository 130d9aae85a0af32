"""Every kernel of every provider against the float64 oracle, over the Op's own cases and every dtype it accepts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from porter.kernels.contract import Evidence, Implementation, Op
from porter.kernels.providers import DEFAULT_CHIP
from porter.kernels.registry import default_registry
from porter.kernels.verification import _moved, verify


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
    checks = list(verify(op, implementation(op, provider)))
    failed = [f"{c.label} in {c.dtype}: {c.error:.2e}, the bound is {c.bound:.2e}" for c in checks if not c.passed]
    assert not failed
    assert any(not c.refused for c in checks), f"{provider} accepts none of the cases of {op.name}/{op.variant}"


def test_arguments_move_with_their_strides() -> None:
    wide = torch.arange(60.0).view(3, 20)
    for tensor in (wide, wide.t(), wide[1:, 2:7], wide[:, ::2], wide[:0], wide.bfloat16()[2, 3:]):
        moved = _moved(tensor, "cpu")
        assert torch.equal(moved, tensor) and moved.stride() == tensor.stride()


def test_verification_of_the_references_and_of_a_fault() -> None:
    for op in default_registry().ops.values():
        honest = Implementation(op.reference, lambda *arguments: None, Evidence("measured"))
        assert all(check.passed and not check.refused for check in verify(op, honest, op.dtypes[-1:]))
    op = default_registry().op("rms_norm", "standard")
    for call in (lambda x, w, e: op.reference(x, w, 0.0), lambda x, w, e: op.reference(x, w, e).double()):
        faulty = Implementation(call, lambda *arguments: None, Evidence("measured"))
        assert not all(check.passed for check in verify(op, faulty, [torch.bfloat16]))
    shy = Implementation(op.reference, lambda *arguments: "never", Evidence("measured"))
    assert all(check.passed and check.refused == "never" for check in verify(op, shy))


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
