"""Verdicts that must not be wrong: models that lack a part, no oracle, wider candidates, other attention, padding."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import bfloat16, golden_of, qwen2
from torch.nn.functional import scaled_dot_product_attention

import porter
from porter.alignment.align import align
from porter.alignment.report_headline import headline
from porter.alignment.roundings import WrittenOut
from porter.cli.app import INTERRUPTED, run
from porter.errors import PorterError

PADDED = [[5, 6, 7, 8, 9, 10, 11], [3, 4]]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    model = bfloat16(qwen2())
    return model, golden_of(model, tmp_path_factory.mktemp("dense") / "golden", new_tokens=2)


@pytest.mark.parametrize("passes", ["weights", "replay", "all"])
def test_a_model_that_lacks_a_layer_is_never_aligned(dense: Any, passes: str) -> None:
    model, golden = dense
    candidate = copy.deepcopy(model)
    candidate.model.layers = candidate.model.layers[:2]
    candidate.config.num_hidden_layers = 2
    report = align(golden, candidate, passes=passes)
    assert report.verdict != "aligned"
    assert 0.3 < report.coverage.parameters < 0.95
    assert any(each.module == "model.layers.2" for each in report.coverage.skipped)
    assert "the candidate has no model.layers.2" in headline(report.to_json())[1]


def test_a_wrong_weight_in_a_wider_candidate_is_judged_by_the_oracle(dense: Any) -> None:
    model, golden = dense
    candidate = qwen2()
    candidate.load_state_dict(model.state_dict())
    with torch.no_grad():
        candidate.model.layers[1].mlp.down_proj.weight[:, 3] *= -1
    report = align(golden, candidate)
    assert report.first_drift is not None and report.first_drift.module == "model.layers.1.mlp.down_proj"
    wrong = [row for row in report.modules if row.status == "drift"]
    assert wrong and all(row.introduced is not None and row.introduced < 1 for row in wrong)
    assert not any("cannot be replayed" in row.why for row in report.modules)


def test_eager_attention_may_round_its_scores_where_the_golden_did_not(tmp_path: Path) -> None:
    model = qwen2("sdpa")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 12  # scores so large that rounding them shows
    golden = porter.capture(bfloat16(model), PADDED, tmp_path / "golden", new_tokens=2)
    candidate = bfloat16(model)
    candidate.set_attn_implementation("eager")
    report = align(golden, candidate)
    assert report.verdict == "aligned", report.first_drift


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "added"])
def test_attention_written_out_is_the_same_mathematics(dtype: torch.dtype, mask: str) -> None:
    torch.manual_seed(3)
    query, key, value = (torch.randn(2, heads, 5, 8, dtype=torch.float64).to(dtype) for heads in (4, 2, 2))
    options: dict[str, Any] = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril(), "scale": 0.2},
        "added": {"attn_mask": torch.randn(5, 5, dtype=torch.float64).to(dtype)},
    }[mask]
    exact = scaled_dot_product_attention(
        *(t.double() for t in (query, key, value)),
        **{name: o.double() if mask == "added" else o for name, o in options.items()},
        enable_gqa=True,
    )
    with WrittenOut():
        found = scaled_dot_product_attention(query, key, value, **options, enable_gqa=True)
    assert found.dtype == dtype
    assert float((found.double() - exact).norm() / exact.norm()) < 4 * torch.finfo(dtype).eps


def unrooted(tmp_path: Path, rows: Any) -> tuple[Any, Any]:
    """A bfloat16 model and a golden of it whose checkpoint is gone: nothing can be replayed in float64."""
    bfloat16(qwen2()).save_pretrained(tmp_path / "checkpoint")
    model = type(qwen2()).from_pretrained(tmp_path / "checkpoint")
    golden = porter.capture(model, rows, tmp_path / "golden", new_tokens=2)
    shutil.rmtree(tmp_path / "checkpoint")
    return model, golden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_an_oracle_a_padded_batch_and_the_goldens_rounding_are_no_drift(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model, golden = unrooted(tmp_path, PADDED)
    report = align(golden, copy.deepcopy(model).to(dtype), passes="replay")
    assert any("no float64 oracle" in each.why for each in report.coverage.skipped)
    assert report.verdict == "aligned", report.first_drift


def test_without_an_oracle_a_module_is_judged_by_what_it_hands_to_its_children(tmp_path: Path) -> None:
    model, golden = unrooted(tmp_path, PADDED)
    model.model.layers[1].self_attn.scaling *= 1.5
    report = align(golden, model, passes="replay")
    assert report.first_drift is not None and report.first_drift.module == "model.layers.1.self_attn"


def test_a_decode_step_wrong_in_a_row_without_padding_is_not_blamed_on_padding(tmp_path: Path) -> None:
    model = qwen2()
    golden = porter.capture(model, PADDED, tmp_path / "golden", new_tokens=3)
    attention = model.model.layers[1].self_attn
    before = attention.forward

    def evicting(hidden_states: Any, *args: Any, cache: Any = None, **options: Any) -> Any:
        if cache is not None and hidden_states.shape[1] == 1:
            layer = cache.layers[1]
            layer.keys = layer.keys.index_fill(2, torch.tensor([0]), 0.0)  # of the other row this is padding
        return before(hidden_states, *args, cache=cache, **options)

    attention.forward = evicting
    report = align(golden, model)
    assert report.first_drift is not None and report.first_drift.module == "model.layers.1.self_attn"
    assert report.causes and "padding-rows" not in {cause.kind for cause in report.causes}


def test_one_layer_in_place_of_two_is_a_drift_of_weights(tmp_path: Path) -> None:
    bfloat16(qwen2()).save_pretrained(tmp_path / "checkpoint")
    model = type(qwen2()).from_pretrained(tmp_path / "checkpoint")
    golden = golden_of(model, tmp_path / "golden", new_tokens=2)
    model.model.layers[2] = model.model.layers[1]
    report = align(golden, model, passes="weights")
    assert report.verdict == "drift"
    assert "model.layers.2" in {cause.module[:14] for cause in report.causes}


def test_a_candidate_on_meta_is_refused_by_name(dense: Any) -> None:
    model, golden = dense
    candidate = copy.deepcopy(model)
    candidate.model.layers[1].mlp.to("meta")
    with pytest.raises(PorterError, match=r"model\.layers\.1\.mlp\.gate_proj\.weight is on meta"):
        align(golden, candidate)


def test_headlines_say_what_no_number_says(dense: Any) -> None:
    model, golden = dense
    candidate = copy.deepcopy(model)
    with torch.no_grad():
        candidate.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    said = headline(align(golden, candidate, passes=("weights", "replay")).to_json())[1]
    assert said == "model.layers.1.mlp.up_proj gives values that are not finite, or of another shape, from step 0 on"
    candidate.lm_head = torch.nn.Linear(24, 128, bias=False)
    del candidate.model.layers[1].mlp.up_proj
    report = align(golden, candidate, passes="weights").to_json()
    assert "(lm_head.weight shape (128, 24) where the source has (128, 48))" in headline(report)[1]


def test_the_headline_says_why_too_little_was_compared(dense: Any) -> None:
    model, golden = dense
    said = headline(align(golden, copy.deepcopy(model), modules="layers.0").to_json())[1]
    assert said.endswith("so nothing can be said: not selected by --modules")


def test_an_interrupt_is_told_in_one_line(dense: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, golden = dense
    (tmp_path / "stops.py").write_text("def build():\n    raise KeyboardInterrupt\n")
    assert run(["align", str(golden.path), f"{tmp_path / 'stops.py'}:build"]) == INTERRUPTED
    assert capsys.readouterr().err.splitlines()[-1] == "porter: interrupted"


def test_the_headline_names_a_parameter_that_differs(tmp_path: Path) -> None:
    bfloat16(qwen2()).save_pretrained(tmp_path / "checkpoint")
    model = type(qwen2()).from_pretrained(tmp_path / "checkpoint")
    golden = golden_of(model, tmp_path / "golden", new_tokens=2)
    model.model.layers[2] = model.model.layers[1]
    assert "model.layers.2." in headline(align(golden, model, passes="weights").to_json())[1]
