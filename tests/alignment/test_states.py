"""States that modules keep, faults that only the free run shows, and positions that are handed on wrongly."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from planted import bfloat16, golden_of, qwen2, randomise

from porter.alignment.align import align
from porter.alignment.budget import Verdict
from porter.alignment.states import growth, judged_states, slope, states_of

SCHEMA = json.loads((Path(__file__).parents[1] / "alignment.schema.json").read_text())
ATTENTION = "model.layers.1.self_attn"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    model = qwen2(layers=2)
    return model, golden_of(model, tmp_path_factory.mktemp("states") / "golden", new_tokens=4)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.set_num_threads(1)
    config = Qwen3NextConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = randomise(Qwen3NextForCausalLM(config))
    return model, golden_of(model, tmp_path_factory.mktemp("recurrent") / "golden", new_tokens=6, rows=1)


def checked(report: Any) -> Any:
    jsonschema.validate(report.to_json(), SCHEMA)
    return report


def drifting(report: Any) -> set[str]:
    return {row.module for row in report.modules if row.status == "drift"}


def cache_of(kwargs: dict[str, Any]) -> Any:
    return next((kwargs[name] for name in ("cache", "past_key_values") if kwargs.get(name) is not None), None)


def forget_a_value(model: Any) -> None:
    """Layer 1 overwrites the last value of its cache, where layer 0 has one token more: in the whole model alone."""
    attention = model.get_submodule(ATTENTION)
    forward = attention.forward

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        cache = cache_of(kwargs)
        tokens = cache.get_seq_length(1) if cache is not None else 0
        if tokens and cache.get_seq_length(0) == tokens + 1:
            cache.layers[1].values[:, :, -1] = cache.layers[1].values[:, :, 0]
        return forward(*args, **kwargs)

    attention.forward = forgetful


def share_a_buffer(model: Any) -> None:
    """Keys and values of layer 1 are returned in one buffer."""
    buffers: dict[Any, torch.Tensor] = {}
    for name in ("k_proj", "v_proj"):
        module = model.get_submodule(f"{ATTENTION}.{name}")

        def into_buffer(x: torch.Tensor, forward: Any = module.forward) -> torch.Tensor:
            found = forward(x)
            return buffers.setdefault((found.shape, found.dtype), torch.empty_like(found)).copy_(found)

        module.forward = into_buffer


def shift_positions(model: Any) -> None:
    """Decode steps are one position too far on."""
    inner = model.model
    forward = inner.forward

    def shifted(*args: Any, **kwargs: Any) -> Any:
        cache = cache_of(kwargs)
        past = cache.get_seq_length() if cache is not None else 0
        if past:
            kwargs["position_ids"] = torch.tensor([[past + 1]])
        return forward(*args, **kwargs)

    inner.forward = shifted


@pytest.mark.parametrize(("fault", "step"), [(forget_a_value, 1), (share_a_buffer, 0)], ids=["cache", "buffer"])
def test_fault_of_state_is_named_where_it_arises(dense: Any, fault: Any, step: int) -> None:
    model, golden = dense
    candidate = bfloat16(model)
    fault(candidate)
    report = checked(align(golden, candidate))
    assert report.verdict == "drift"
    assert (report.first_drift.module, report.first_drift.step) == (ATTENTION, step)
    assert drifting(report) == {ATTENTION}
    for row in report.modules:
        if row.status == "drift":
            assert row.introduced > row.budget
            assert "fault of state" in row.why and "golden inputs" in row.why


def test_positions_are_the_fault_of_the_module_that_hands_them_on(dense: Any) -> None:
    model, golden = dense
    candidate = bfloat16(model)
    shift_positions(candidate)
    report = checked(align(golden, candidate))
    assert (report.first_drift.module, report.first_drift.step) == ("model", 1)
    assert report.first_drift.tensor.startswith("rotary_emb.")
    assert drifting(report) == {"model"}


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_finite_in_the_free_run_is_never_aligned(dense: Any, broken: float) -> None:
    model, golden = dense
    candidate = copy.deepcopy(model)
    forward = candidate.forward

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        cache = cache_of(kwargs)
        if cache is not None and cache.get_seq_length(1) > 21:
            output.logits[..., 5] = broken
        return output

    candidate.forward = poisoned
    report = checked(align(golden, candidate))
    assert report.verdict != "aligned"
    assert report.tokens.kl_max == float("inf") or report.tokens.top1_agreement < 1.0


def narrow_state(model: Any, dtype: torch.dtype) -> str:
    layer = model.model.layers[0].linear_attn
    forward = layer.forward

    def narrowed(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        cache = cache_of(kwargs)
        if cache is not None:
            states = cache.layers[0].recurrent_states
            cache.layers[0].recurrent_states = {key: s.to(dtype).to(s.dtype) for key, s in states.items()}
        return output

    layer.forward = narrowed
    return "model.layers.0.linear_attn"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recurrent_state_stored_too_coarsely(recurrent: Any, dtype: torch.dtype) -> None:
    model, golden = recurrent
    right = checked(align(golden, copy.deepcopy(model).to(dtype), passes="replay"))
    assert right.verdict == "aligned", right.first_drift
    grown = [row.why for row in right.modules if row.module.endswith("linear_attn") and row.why]
    assert len(grown) == 1 and "recurrent_states" in grown[0] and "a step" in grown[0]
    candidate = copy.deepcopy(model).to(dtype)
    name = narrow_state(candidate, torch.bfloat16)
    report = checked(align(golden, candidate, passes="replay"))
    assert report.first_drift.module == name
    assert report.first_drift.tensor == "state.recurrent_states"
    assert drifting(report) == {name}


class Layer:
    def __init__(self, **states: Any) -> None:
        self.__dict__.update(states)


class Cache:
    def __init__(self, *layers: Layer) -> None:
        self.layers = layers


def test_states_in_a_cache_and_their_errors() -> None:
    exact = torch.randn(2, 3, 7, 5, dtype=torch.float64)
    states = states_of(Cache(Layer(keys=None), Layer(keys=exact, recurrent_states={0: exact[0]})))
    assert set(states) == {"keys", "recurrent_states"}
    noisy = exact * (1 + 1e-3 * torch.randn_like(exact))
    error = states_of(Cache(Layer(keys=noisy)))["keys"].error(states["keys"])
    assert error == pytest.approx(float((noisy - exact).norm() / exact.norm()), rel=0.15)
    assert states_of(Cache(Layer(keys=exact[:1])))["keys"].error(states["keys"]) is None
    assert states_of(Cache(Layer(keys=exact.bfloat16().float())))["keys"].held == torch.bfloat16
    assert states_of(Cache(Layer(keys=exact.float())))["keys"].held == torch.float32
    assert not states_of(None)


def test_coarse_states_are_over_and_other_layouts_are_left_alone() -> None:
    exact = torch.randn(4, 64, dtype=torch.float64)

    def seen(tensor: torch.Tensor) -> Any:
        return states_of(Cache(Layer(recurrent_states=tensor)))

    rounded = [seen((exact * (1 + 2e-3 * torch.randn_like(exact))).float())]
    assert [v.over for v in judged_states(rounded[0], seen(exact), rounded, 2.0)] == [False]
    assert [v.over for v in judged_states(seen(exact.bfloat16()), seen(exact), rounded, 2.0)] == [True]
    assert not judged_states(seen(exact.flip(0)), seen(exact), rounded, 2.0)


def test_growth_is_the_slope_over_the_steps() -> None:
    assert slope([1.0, 3.0, 5.0, 7.0]) == pytest.approx(2.0)
    calls = [[Verdict("state.keys", 0.1 * k, 1.0, 0.01)] for k in range(1, 6)]
    assert "keys 0.1 -> 0.5 over 5 steps, +0.1 a step where rounding makes" in growth(calls)
    assert growth(calls[:3]) == ""


def test_a_mask_that_lets_everything_through_is_the_fault_of_the_layer_that_hands_it_on(dense: Any) -> None:
    model, golden = dense
    candidate = bfloat16(model)
    layer = candidate.model.layers[1]
    forward = layer.forward

    def unmasked(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **(kwargs | {"attention_mask": torch.zeros_like(kwargs["attention_mask"])}))

    layer.forward = unmasked
    report = checked(align(golden, candidate))
    assert (report.first_drift.module, report.first_drift.tensor) == ("model.layers.1", "self_attn.attention_mask")
    assert drifting(report) == {"model.layers.1"}
