"""Faults past a boundary that the recorded golden does not reach, and the smallest regime that shows them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from planted import bfloat16, deepseek_v3, golden_of, qwen2, randomise

import porter
from porter.alignment.align import align
from porter.alignment.report_headline import headline
from porter.alignment.sweep import SweptReport, sweep
from porter.alignment.sweep_budget import Extent
from porter.errors import PorterError

SCHEMA = json.loads((Path(__file__).parents[1] / "alignment.schema.json").read_text())
LONGEST = 52


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    model = qwen2(layers=2)
    return model, golden_of(model, tmp_path_factory.mktemp("dense") / "golden")


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    model = deepseek_v3()
    return model, golden_of(model, tmp_path_factory.mktemp("sparse") / "golden", rows=1, new_tokens=1)


def swept(golden: Any, candidate: Any, longest: int = LONGEST) -> SweptReport:
    report = sweep(golden, candidate, longest=longest)
    jsonschema.validate(report.to_json(), SCHEMA)
    json.dumps(report.to_json(), allow_nan=False)
    return report


def wrap(module: Any, change: Callable[..., Any]) -> None:
    """`change(forward, *args, **kwargs)` instead of the module's forward."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: change(forward, *args, **kwargs)


def unmasked_past_48(model: Any) -> None:
    """The attention of one layer drops its mask where the keys are more than 48."""

    def change(forward: Any, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs["attention_mask"]
        if mask is not None and mask.shape[-1] > 48:
            kwargs["attention_mask"] = torch.zeros_like(mask)
        return forward(*args, **kwargs)

    wrap(model.model.layers[1].self_attn, change)


def padding_unmasked_in_decode_past_48(model: Any) -> None:
    """The same, but of single queries: what they must not see is padding."""

    def change(forward: Any, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs["attention_mask"]
        if mask is not None and mask.shape[-1] > 48 and mask.shape[-2] == 1:
            kwargs["attention_mask"] = torch.zeros_like(mask)
        return forward(*args, **kwargs)

    wrap(model.model.layers[1].self_attn, change)


def short_rope_table(model: Any) -> None:
    """Positions past 40 get the angles of 40."""
    wrap(
        model.model.rotary_emb,
        lambda forward, x, position_ids: forward(x, position_ids.clamp(max=40)),
    )


def raises_past_50(model: Any) -> None:
    """A buffer of 50 rows."""

    def change(forward: Any, hidden: Any) -> Any:
        return forward(hidden) + hidden.new_zeros(50, 1)[torch.arange(hidden.shape[1])]

    wrap(model.model.layers[0].mlp, change)


def right_padding_ignored(model: Any) -> None:
    """A mask that ends in zeros is taken to be all ones, then and in the steps after."""

    def change(forward: Any, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None and bool(mask[:, 0].all()):
            kwargs["attention_mask"] = torch.ones_like(mask)
        return forward(*args, **kwargs)

    wrap(model.model, change)


def chunks_start_at_zero(model: Any) -> None:
    """Positions are counted from the beginning of each chunk; single tokens are right."""

    def change(forward: Any, *args: Any, **kwargs: Any) -> Any:
        tokens, cache = kwargs["input_ids"], kwargs.get("cache")
        if cache is not None and cache.get_seq_length() and tokens.shape[1] > 1:
            kwargs["position_ids"] = torch.arange(tokens.shape[1])[None]
        return forward(*args, **kwargs)

    wrap(model.model, change)


def wrong_up_to_8_tokens(model: Any) -> None:
    """A kernel for few rows that is off by a thousandth."""
    wrap(
        model.model.layers[1].mlp.down_proj,
        lambda forward, x: forward(x) * (1.001 if x.shape[0] * x.shape[1] <= 8 else 1.0),
    )


def enlarged_window(model: Any) -> None:
    """A sliding window of one more than the source's 30."""
    model.config.sliding_window = 31
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 31


FAULTS: list[tuple[Callable[[Any], None], str, str]] = [
    (unmasked_past_48, "fails from sequence length 49, prefill; passes at 48", "model.layers.1.self_attn"),
    (
        padding_unmasked_in_decode_past_48,
        "fails from sequence length 49, decode, batch 2, left-padded; passes at 48",
        "model.layers.1.self_attn",
    ),
    (short_rope_table, "fails from position offset 41, sequence length 1, prefill; passes at 40", "model.rotary_emb"),
    (raises_past_50, "fails from sequence length 51, prefill; passes at 50", "model.layers.0.mlp"),
    (
        right_padding_ignored,
        "fails at sequence length 3 already, decode, batch 2, right-padded; passes without padding, in one prefill",
        "model",
    ),
    (chunks_start_at_zero, "fails at sequence length 4 already, chunked prefill; passes in one prefill", "model"),
    (wrong_up_to_8_tokens, "fails up to sequence length 8, prefill; passes at 9", "model.layers.1.mlp.down_proj"),
]


@pytest.mark.parametrize(("plant", "says", "module"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_fault_past_a_boundary(dense: Any, plant: Callable[[Any], None], says: str, module: str) -> None:
    model, golden = dense
    candidate = bfloat16(model)
    plant(candidate)
    if plant is not wrong_up_to_8_tokens:
        assert align(golden, candidate).verdict == "aligned", "the golden alone must not show this fault"
    report = swept(golden, candidate)
    assert report.verdict == "drift"
    assert report.sweep["says"] == says
    assert report.first_drift is not None and report.first_drift.module.startswith(module)
    assert report.sweep["failing"]["failing"] and report.sweep["tried"]
    assert any(row.status == "drift" for row in report.modules) or plant is raises_past_50


def test_gate_narrowed_for_many_tokens(tmp_path: Path) -> None:
    """In bfloat16 the noise of a whole run hides it: only the replay at the greatest length shows it."""
    model = deepseek_v3()
    golden = porter.capture(model, [[5, 6, 7, 8]], tmp_path / "golden", new_tokens=1)
    candidate = bfloat16(model)
    gate = candidate.model.layers[1].mlp.gate
    forward = gate.forward

    def narrowed(hidden: Any) -> Any:
        found = forward(hidden)
        wide = (each.to(torch.bfloat16).to(each.dtype) if each.is_floating_point() else each for each in found)
        return found if found[0].shape[0] <= 8 else tuple(wide)

    gate.forward = narrowed
    assert align(golden, candidate).verdict == "aligned"
    report = swept(golden, candidate, 33)
    assert report.sweep["says"] == "fails from sequence length 9, prefill; passes at 8"
    assert report.first_drift is not None and report.first_drift.module == "model.layers.1.mlp.gate"


def test_sliding_window_off_by_one(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = qwen2(layers=1).config.to_dict()
    config |= {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 0, "layer_types": None}
    model: Any = randomise(Qwen2ForCausalLM(Qwen2Config.from_dict(config)))
    model.set_attn_implementation("eager")
    golden = golden_of(model, tmp_path / "golden")
    candidate = copy.deepcopy(model)
    assert swept(golden, candidate, 40).verdict == "aligned"
    enlarged_window(candidate)
    assert align(golden, candidate).verdict == "aligned"
    report = swept(golden, candidate, 40)
    assert report.sweep["says"] == "fails from sequence length 31, prefill; passes at 30"


def test_legitimate_dense_port_passes(dense: Any) -> None:
    model, golden = dense
    candidate = bfloat16(model)
    candidate.set_attn_implementation("sdpa")
    report = swept(golden, candidate)
    assert report.verdict == "aligned", report.sweep["says"]
    assert report.sweep["failing"] is None and not report.sweep["not_tried"] and not report.sweep["source_inconsistent"]
    modes = {(each["regime"]["mode"], each["regime"]["padding"]) for each in report.sweep["tried"]}
    padded = {(mode, side) for mode in ("prefill", "decode") for side in ("left", "right")}
    assert modes == {("prefill", "none"), ("decode", "none"), ("chunked", "none")} | padded
    assert {each["regime"]["length"] for each in report.sweep["tried"]} >= {1, 2, LONGEST}


def test_legitimate_sparse_port_passes(sparse: Any) -> None:
    model, golden = sparse
    candidate = bfloat16(model)
    candidate.set_experts_implementation("grouped_mm")
    report = swept(golden, candidate, 33)
    assert report.verdict == "aligned", report.sweep["says"]
    loads = report.sweep["tokens_per_expert"]
    assert loads["none"] and loads["one"] and loads["most"] > 33


def test_recordings_and_lengths_that_do_not_exist_are_refused(dense: Any) -> None:
    model, golden = dense
    with pytest.raises(PorterError, match="recording"):
        sweep(golden, golden)
    for longest in (0, 129):
        with pytest.raises(PorterError, match=f"--sweep-length {longest}"):
            sweep(golden, model, longest=longest)


def test_a_tied_model_is_swept_in_another_dtype(tmp_path: Path) -> None:
    config = qwen2(layers=1).config
    config.tie_word_embeddings = True
    model: Any = randomise(type(qwen2(layers=1))(config))
    report = swept(golden_of(model, tmp_path / "golden", new_tokens=1), bfloat16(model), 2)
    assert report.verdict == "aligned" and not report.sweep["not_tried"]
    assert report.sweep["says"] == "passes in 11 regimes up to sequence length 2"


def test_nothing_is_aligned_that_could_not_be_swept(dense: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, golden = dense
    source = copy.deepcopy(model)

    def unlike_recorded(forward: Any, *args: Any, **kwargs: Any) -> Any:
        if args[0].shape[1] < 8 and args[0].dtype != torch.float64:
            raise NotImplementedError("no short sequences")
        return forward(*args, **kwargs)

    wrap(source.model.layers[0].mlp, unlike_recorded)
    monkeypatch.setattr("porter.alignment.sweep.rebuild_source", lambda *_: source)
    monkeypatch.setattr("porter.alignment.sweep.extent_of", lambda *_: Extent(2, 127, 128, False, "a test"))
    report = sweep(golden, copy.deepcopy(model), passes="weights")
    assert report.verdict == "incomparable"
    assert "no regime could be tried: the source cannot run it: NotImplementedError" in headline(report.to_json())[1]
