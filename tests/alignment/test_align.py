"""Planted faults are found at their module; legitimate ports are aligned; the report is what the contract says."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from planted import FAULTS, bfloat16, deepseek_v3, golden_of, qwen2

import porter
from porter.alignment.align import align
from porter.errors import PorterError

SCHEMA = json.loads((Path(__file__).parents[1] / "alignment.schema.json").read_text())


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    model = qwen2()
    return model, golden_of(model, tmp_path_factory.mktemp("dense") / "golden")


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    model = deepseek_v3()
    return model, golden_of(model, tmp_path_factory.mktemp("sparse") / "golden")


def checked(report: Any) -> Any:
    jsonschema.validate(report.to_json(), SCHEMA)
    json.dumps(report.to_json(), allow_nan=False)
    return report


@pytest.mark.parametrize("passes", [("replay",), ("weights", "replay", "free")], ids="-".join)
@pytest.mark.parametrize("name", FAULTS)
def test_fault_below_the_noise_is_found_at_its_module(dense: Any, name: str, passes: tuple[str, ...]) -> None:
    model, golden = dense
    candidate = bfloat16(model)
    with torch.no_grad():
        module = FAULTS[name](candidate)
    report = checked(align(golden, candidate, passes=passes))
    assert report.verdict == "drift"
    assert report.first_drift.module == module
    assert {row.module for row in report.modules if row.status == "drift"} == {module}
    assert report.causes and report.causes[0].module == module
    for row in report.modules:
        if row.status == "drift":
            assert row.introduced > row.budget


def test_weights_alone_name_the_module(dense: Any) -> None:
    model, golden = dense
    candidate = bfloat16(model)
    with torch.no_grad():
        module = FAULTS["halve_key_bias"](candidate)
    report = checked(align(golden, candidate, passes="weights"))
    assert (report.verdict, report.first_drift.module, report.first_drift.tensor) == ("drift", module, "bias")
    assert [row.parameter for row in report.weights if row.status == "drift"] == [f"{module}.bias"]
    assert not report.modules


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_other_precision_or_attention_is_aligned(dense: Any, dtype: torch.dtype, attention: str) -> None:
    model, golden = dense
    candidate = copy.deepcopy(model).to(dtype)
    candidate.set_attn_implementation(attention)
    report = checked(align(golden, candidate))
    assert report.verdict == "aligned", report.first_drift
    assert report.coverage.parameters == report.coverage.modules == 1.0
    assert not report.coverage.skipped
    assert report.tokens.compared == 2 * (20 + 2)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_experts_are_aligned(sparse: Any, dtype: torch.dtype, experts: str) -> None:
    model, golden = sparse
    candidate = copy.deepcopy(model).to(dtype)
    candidate.set_experts_implementation(experts)
    report = checked(align(golden, candidate))
    assert report.verdict == "aligned", report.first_drift
    assert report.coverage.parameters == 1.0
    assert report.routing.decisions == 2 * (20 + 2)
    assert report.routing.flips == report.routing.benign


def test_sdpa_golden_against_eager_candidate(tmp_path: Path) -> None:
    model = qwen2("sdpa")
    candidate = bfloat16(model)
    candidate.set_attn_implementation("eager")
    report = checked(align(golden_of(model, tmp_path / "golden"), candidate))
    assert report.verdict == "aligned", report.first_drift


def test_router_without_its_bias_is_a_fault_of_the_gate(sparse: Any) -> None:
    model, golden = sparse
    candidate = bfloat16(model)
    candidate.model.layers[1].mlp.gate.e_score_correction_bias.zero_()
    report = checked(align(golden, candidate))
    assert report.first_drift.module == "model.layers.1.mlp.gate"
    assert report.routing.flips > report.routing.benign


def test_gate_in_bfloat16_is_a_drift_though_no_choice_flips(sparse: Any) -> None:
    model, golden = sparse
    candidate = bfloat16(model)
    gate = candidate.model.layers[1].mlp.gate
    forward = gate.forward

    def narrowed(hidden_states: Any) -> Any:
        logits, weights, experts = forward(hidden_states)
        return logits.to(torch.bfloat16).float(), weights, experts

    gate.forward = narrowed
    report = checked(align(golden, candidate, passes="replay"))
    assert report.first_drift.module == "model.layers.1.mlp.gate"
    assert {row.module for row in report.modules if row.status == "drift"} == {"model.layers.1.mlp.gate"}


def test_fault_of_state_shows_in_the_free_run_alone(dense: Any) -> None:
    model, golden = dense
    candidate = bfloat16(model)
    attention = candidate.model.layers[1].self_attn
    forward = attention.forward

    def stale(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache")
        # Another layer's keys: right as long as this module is alone with its cache.
        if cache is not None and cache.layers[0].is_initialized and cache.get_seq_length(1):
            cache.layers[1].keys = cache.layers[0].keys[:, :, :-1].clone()
        return forward(*args, **kwargs)

    attention.forward = stale
    report = checked(align(golden, candidate))
    assert report.verdict == "drift"
    assert report.first_drift.step == 1
    assert report.first_drift.module.startswith("model.layers.1.self_attn")
    drifted = next(row for row in report.modules if row.status == "drift")
    assert "free run" in drifted.why


def test_padded_rows_are_not_compared(tmp_path: Path) -> None:
    model = qwen2()
    rows = [[5, 6, 7, 8, 9, 10, 11], [3, 4]]
    golden = porter.capture(model, rows, tmp_path / "golden", new_tokens=2)
    candidate = bfloat16(model)
    candidate.set_attn_implementation("sdpa")
    report = checked(align(golden, candidate))
    assert report.verdict == "aligned", report.first_drift
    assert report.tokens.compared == 7 + 2 + 2


def test_too_little_compared_is_incomparable(dense: Any) -> None:
    model, golden = dense
    report = checked(align(golden, copy.deepcopy(model), modules="layers.0"))
    assert report.verdict == "incomparable"
    assert report.coverage.parameters < 0.95
    assert any("--modules" in skipped.why for skipped in report.coverage.skipped)


def test_unmatched_modules_are_listed_and_lower_the_coverage(dense: Any) -> None:
    model, golden = dense
    candidate = copy.deepcopy(model)
    layer = candidate.model.layers[0]
    layer.feed_forward = layer.mlp
    del layer.mlp
    forward_layer = type(layer).forward
    layer.forward = lambda *a, **k: forward_layer(_Renamed(layer), *a, **k)
    report = checked(align(golden, candidate))
    assert "model.layers.0.mlp.up_proj" in report.unmatched["golden"]
    assert "model.layers.0.feed_forward.up_proj" in report.unmatched["candidate"]
    assert report.coverage.parameters < 0.95
    assert report.verdict == "incomparable"


class _Renamed:
    """The layer as its forward sees it, with the MLP under its old name."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, "feed_forward" if name == "mlp" else name)


def test_bad_requests_are_refused_by_name(dense: Any, tmp_path: Path) -> None:
    model, golden = dense
    for given, word in (
        ({"passes": "everything"}, "everything"),
        ({"modules": "("}, "--modules"),
        ({"correspondence": [{"target": "a"}]}, "sources"),
    ):
        with pytest.raises(PorterError, match=word):
            align(golden, model, **given)
    with pytest.raises(PorterError, match="no such directory"):
        align(golden, tmp_path / "nowhere")
    with pytest.raises(PorterError, match="--correspondence"):
        align(golden, torch.nn.Sequential(torch.nn.Linear(2, 2)))
