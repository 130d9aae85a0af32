"""The Ops under fake and meta tensors, torch.compile and torch.export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from porter.kernels.contract import Op, tensors
from porter.kernels.dispatch import OpCall, op_calls, using_reference
from porter.kernels.library import register_library
from porter.kernels.reference.linear import OPS as LINEAR
from porter.kernels.reference.norm import OPS as NORM
from porter.kernels.registry import OpRegistry, default_registry

ALL = [pytest.param(op, id=op.qualified) for op in default_registry().ops.values()]

SELECTIVE = ("experts", "sparse_mla_attention", "router_hash")
"""Ops that read only what their indices name."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8 * 16).view(16, 8))
        self.norm = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.rms_norm = OpCall("rms_norm", "standard")
        self.linear = OpCall("linear", "standard")
        self.swiglu = OpCall("swiglu", "standard")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.swiglu(self.linear(self.rms_norm(x, self.norm, 1e-6), self.weight, None))  # type: ignore[no-any-return]


def operator(op: Op) -> Any:
    register_library(default_registry())
    return getattr(torch.ops.porter, op.qualified).default


@pytest.mark.parametrize("op", ALL)
def test_fake_outputs_are_those_of_the_reference(op: Op) -> None:
    for case in op.inputs(op.dtypes[-1]):
        call = OpCall(op.name, op.variant)
        expected = tensors(op.reference(*case.arguments))
        with FakeTensorMode() as mode:
            arguments = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in case.arguments]
            fake = tensors(call(*arguments))
        meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in case.arguments]
        described = [(t.shape, t.dtype) for t in expected]
        assert [(t.shape, t.dtype) for t in fake] == described, case.label
        if any(isinstance(a, torch.Tensor) for a in meta):
            outputs = tensors(call(*meta))
            assert [(t.shape, t.dtype, t.device.type) for t in outputs] == [(*d, "meta") for d in described]
            assert op.cost(*meta) == op.cost(*case.arguments)
            assert call.calls == {}


@pytest.mark.parametrize("op", ALL)
def test_costs_count_every_tensor_once(op: Op) -> None:
    for case in op.inputs(op.dtypes[-1]):
        outputs = tensors(op.reference(*case.arguments))
        every = [t for t in (*case.arguments, *outputs) if isinstance(t, torch.Tensor)]
        cost = op.cost(*case.arguments)
        whole = sum(t.numel() * t.element_size() for t in every)
        assert (cost.bytes <= whole) if {op.name, op.qualified} & set(SELECTIVE) else (cost.bytes == whole), case.label
        assert cost.flops > 0 or not all(t.numel() for t in every)


@pytest.mark.parametrize("op", ALL)
def test_torch_accepts_the_operator(op: Op) -> None:
    case = next(iter(op.inputs(torch.float32)))
    torch.library.opcheck(operator(op), case.arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("op", ALL)
def test_the_operator_computes_the_op(op: Op) -> None:
    with torch.no_grad():
        for case in op.inputs(torch.float32):
            error = op.error(operator(op)(*case.arguments), op.oracle(*case.arguments), *case.arguments)
            assert error <= op.tolerance.relative(torch.float32, *case.arguments), case.label


def graph_of(block: nn.Module, x: torch.Tensor) -> tuple[torch.fx.GraphModule, torch.Tensor]:
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    output = torch.compile(block, backend=keep, fullgraph=True)(x)
    assert len(graphs) == 1
    return graphs[0], output


def test_compile_sees_operators_and_agrees() -> None:
    block, x = Block(), torch.randn(3, 8)
    with torch.no_grad():
        graph, output = graph_of(block, x)
        torch.testing.assert_close(output, block(x))
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert names == ["porter.rms_norm_standard", "porter.linear_standard", "porter.swiglu_standard"]


def test_compile_with_gradients_traces_the_reference() -> None:
    block, x = Block(), torch.randn(3, 8)
    _, output = graph_of(block, x)
    output.sum().backward()
    compiled = [p.grad.clone() for p in block.parameters() if p.grad is not None]
    block.zero_grad()
    block(x).sum().backward()
    for ours, parameter in zip(compiled, block.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad)


def test_compile_under_using_reference_traces_the_reference() -> None:
    block, x = Block(), torch.randn(3, 8)
    with torch.no_grad(), using_reference(block):
        graph, output = graph_of(block, x)
        torch.testing.assert_close(output, block(x))
    assert not any("porter." in str(node.target) for node in graph.graph.nodes)


def test_export_keeps_operators() -> None:
    block, x = Block(), torch.randn(3, 8)
    with torch.no_grad():
        program = torch.export.export(block, (x,))
        torch.testing.assert_close(program.module()(x), block(x))
    assert "torch.ops.porter.swiglu_standard.default" in program.graph_module.code


def test_a_meta_model_runs_without_weights() -> None:
    with torch.device("meta"):
        block = Block()
    output = block(torch.empty(3, 8, device="meta"))
    assert output.shape == (3, 8) and output.is_meta
    assert all(not call.calls for _, call in op_calls(block))


def test_a_second_registration_keeps_the_first() -> None:
    register_library(default_registry())
    second = OpRegistry.of(NORM)
    register_library(second)
    register_library(second)
    call = OpCall("rms_norm", "standard", second)
    assert call(torch.empty(2, 3, device="meta"), torch.empty(3, device="meta"), 1e-6).shape == (2, 3)


def test_another_versions_operator_is_refused() -> None:
    register_library(default_registry())
    first = LINEAR[0]
    changed = Op(**{**{n: getattr(first, n) for n in first.__dataclass_fields__}, "schema": "(Tensor x) -> Tensor"})
    with pytest.raises(RuntimeError, match=r"another version of porter defined torch.ops.porter.linear_standard"):
        register_library(OpRegistry.of([changed]))
