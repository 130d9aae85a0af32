"""Contracts read from the source text of a forward: routers, norms, softmax, states."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_sides import Sides, bound, found, kept_wide
from planted import deepseek_v3, golden_of, qwen2
from torch import Tensor, nn

from porter.alignment.contract_lint.code import code_facts


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    torch.set_num_threads(1)
    model = qwen2()
    return model, golden_of(model, tmp_path_factory.mktemp("dense") / "golden")


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    torch.set_num_threads(1)
    model = deepseek_v3()
    return model, golden_of(model, tmp_path_factory.mktemp("sparse") / "golden")


def narrow_router(self: Any, hidden_states: Tensor) -> Any:
    hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
    logits = nn.functional.linear(hidden_states, self.weight.to(hidden_states.dtype))
    return logits, logits, logits


def router_returning_narrow(self: Any, hidden_states: Tensor) -> Any:
    flat = hidden_states.view(-1, hidden_states.shape[-1])
    logits = nn.functional.linear(flat.float(), self.weight.float())
    return logits.to(hidden_states.dtype), logits, logits


def router_by_another_function(self: Any, hidden_states: Tensor) -> Any:
    return unknown_kernel(self, hidden_states)


def unknown_kernel(self: Any, hidden_states: Tensor) -> Any:
    raise NotImplementedError


def wide_router(self: Any, hidden_states: Tensor) -> Any:
    flat = hidden_states.view(-1, hidden_states.shape[-1]).float()
    return flat @ self.weight.float().T, flat, flat


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (narrow_router, "scores in line"),
        (router_returning_narrow, "scores returned in line"),
        (router_by_another_function, None),
        (wide_router, None),
    ],
)
def test_routers_that_compute_or_return_narrower(sparse: Sides, function: Any, what: str | None) -> None:
    model, golden = sparse
    candidate = kept_wide(model)
    bound(candidate.model.layers[1].mlp.gate, function)
    findings = found(golden, model, candidate)
    assert [(f.kind, f.module) for f in findings] == ([("router-dtype", "model.layers.1.mlp.gate")] if what else [])
    if what:
        line = int(findings[0].what.split("line ")[1].split(" ")[0])
        text = Path(__file__).read_text().splitlines()[line - 1]
        assert findings[0].what.startswith(what) and ("linear(" in text or "return logits.to" in text)
        assert not findings[0].certain


def test_in_float32_a_router_without_casts_is_as_wide(sparse: Sides) -> None:
    model, golden = sparse
    candidate = copy.deepcopy(model)
    bound(candidate.model.layers[1].mlp.gate, narrow_router)
    assert found(golden, model, candidate) == []


def narrow_norm(self: Any, hidden_states: Tensor) -> Tensor:
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


def squared_helper(hidden_states: Tensor) -> Tensor:
    return (hidden_states * hidden_states).mean(-1, keepdim=True)


def norm_with_a_helper(self: Any, hidden_states: Tensor) -> Tensor:
    return self.weight * hidden_states * torch.rsqrt(squared_helper(hidden_states) + self.variance_epsilon)


@pytest.mark.parametrize("function", [narrow_norm, norm_with_a_helper])
def test_norms_that_accumulate_narrower(dense: Sides, function: Any) -> None:
    model, golden = dense
    candidate = kept_wide(model)
    for layer in candidate.model.layers:
        bound(layer.input_layernorm, function)
    findings = found(golden, model, candidate)
    assert [f.module for f in findings] == [f"model.layers.{i}.input_layernorm" for i in range(3)]
    assert {(f.kind, f.golden, f.candidate) for f in findings} == {("norm-accumulation", "float32", "bfloat16")}


def attention_with_a_narrow_softmax(self: Any, hidden_states: Tensor, **rest: Any) -> Any:
    value = self.v_proj(hidden_states)
    weights = torch.softmax(hidden_states @ hidden_states.transpose(1, 2), dim=-1)
    return self.o_proj(weights @ value), weights


def test_a_softmax_in_the_dtype_it_is_given(dense: Sides) -> None:
    model, golden = dense
    candidate = kept_wide(model)
    bound(candidate.model.layers[2].self_attn, attention_with_a_narrow_softmax)
    (finding,) = found(golden, model, candidate)
    assert (finding.kind, finding.module) == ("softmax-dtype", "model.layers.2.self_attn")
    assert "test_contract_code.py" in finding.what


def recurrent(self: Any, hidden_states: Tensor) -> Tensor:
    recurrent_state = hidden_states.float().cumsum(1).to(torch.float16)
    return self.down_proj(recurrent_state.to(hidden_states.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_state_cast_to_sixteen_bits_is_named_in_any_precision(dense: Sides, dtype: torch.dtype) -> None:
    model, golden = dense
    candidate = copy.deepcopy(model) if dtype == torch.float32 else kept_wide(model)
    bound(candidate.model.layers[0].mlp, recurrent)
    (finding,) = found(golden, model, candidate)
    assert (finding.kind, finding.module) == ("state-dtype", "model.layers.0.mlp")
    assert finding.what.startswith("recurrent_state is cast to 16 bits")


def test_code_without_source_text_says_nothing(dense: Sides) -> None:
    model, golden = dense
    candidate = kept_wide(model)
    scope: dict[str, Any] = {}
    exec("def forward(self, x):\n    return x.pow(2).mean(-1)", scope)
    bound(candidate.model.norm, scope["forward"])
    assert code_facts(candidate.model.norm, torch.bfloat16).unread
    assert found(golden, model, candidate) == []
