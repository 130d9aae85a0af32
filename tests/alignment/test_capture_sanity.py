"""Capture-point sanity: each way in which a capture misleads is named; captures in order say so and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toy_decoder import Decoder, Layer, Reused, TwoStreams, recorded, tokens

from porter.alignment.calls import Recorded
from porter.alignment.capture_sanity import NEVER_CALLED, invalid, sanity_of_model, sanity_of_recording
from porter.alignment.capture_trace import recorded_passages, watching
from porter.alignment.layer_chain import chains_of
from porter.alignment.report import SanityCheck
from porter.golden.store import Golden
from porter.golden.unseen import NEVER_SEEN


def found(checks: list[SanityCheck], status: str) -> dict[str, SanityCheck]:
    return {check.check: check for check in checks if check.status == status}


def checked(golden: Golden, model: nn.Module, run: bool = True) -> list[SanityCheck]:
    return sanity_of_model(golden, Recorded(golden, torch.float32, torch.device("cpu")), model.eval(), run)


@pytest.mark.parametrize("detail", ["full", "sketch", "stats"])
def test_a_sound_pair_is_in_order_at_every_detail(tmp_path: Path, detail: str) -> None:
    model = Decoder()
    checks = checked(recorded(model, tmp_path / "golden", detail=detail), model)
    assert {check.check for check in checks if check.status == "ok"} == {
        "layer-chain",
        "final-norm",
        "token-ids",
        "observer",
        "in-place",
    }
    assert {(check.check, check.module) for check in checks if check.status != "ok"} == {("gap", "spare")}
    assert [c.says for c in checks if c.check == "gap"] == [
        f"golden: {NEVER_SEEN}",
        f"candidate: {NEVER_CALLED}",
    ]


def test_chains_are_the_outermost_layers_alone(tmp_path: Path) -> None:
    model = Decoder()
    model.layers[1].experts = nn.ModuleList([nn.Identity(), nn.Identity()])
    model.layers[1].forward = lambda hidden: hidden + model.layers[1].experts[0](hidden) * 0.5
    (chain,) = chains_of(recorded_passages(recorded(model, tmp_path / "golden")))
    assert chain.container == "layers" and chain.layers == ("layers.0", "layers.1", "layers.2")


def test_code_between_layers_breaks_the_chain_and_is_named_with_its_size(tmp_path: Path) -> None:
    model = Decoder()
    model.between = lambda hidden: hidden * 1.25
    checks = checked(recorded(model, tmp_path / "golden"), model, run=False)
    note = found(checks, "note")["layer-chain"]
    assert note.module == "layers.1" and "does not get what layers.0 returned (they differ by 0.25)" in note.says
    assert "1 other places" in note.says and not invalid(checks)


@pytest.mark.parametrize("detail", ["full", "stats"])
def test_hidden_and_residual_streams_are_told_apart(tmp_path: Path, detail: str) -> None:
    model = Decoder(TwoStreams)
    checks = checked(recorded(model, tmp_path / "golden", detail=detail), model)
    notes = [check for check in checks if check.check == "streams"]
    assert [check.says.split("'")[0] for check in notes] == ["the golden", "the candidate"]
    assert "2 streams" in notes[0].says
    assert found(checks, "ok")["layer-chain"]


def test_a_residual_that_does_not_arrive_breaks_the_chain(tmp_path: Path) -> None:
    model = Decoder(TwoStreams)
    original = model.layers[1].forward
    model.layers[1].forward = lambda hidden, residual=None: original(hidden, residual)
    golden = recorded(model, tmp_path / "golden")
    lines = (golden.path / "records.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    layer = next(e for e in entries if e.get("module") == "layers.1")
    layer["inputs"]["dict"]["args"]["list"][1]["digest"] = "sha256:other"
    (golden.path / "records.jsonl").write_text("\n".join(map(json.dumps, entries)) + "\n")
    checks = checked(Golden.open(golden.path), model, run=False)
    assert found(checks, "note")["layer-chain"].module == "layers.1"


def test_outputs_recorded_from_one_buffer_without_a_copy_void_the_comparison(tmp_path: Path) -> None:
    golden = recorded(Decoder(), tmp_path / "golden")
    entries = [json.loads(line) for line in (golden.path / "records.jsonl").read_text().splitlines()]
    last = next(e for e in entries if e.get("module") == "layers.2")["outputs"]
    for entry in entries:
        if str(entry.get("module")).startswith("layers.") and entry["module"].count(".") == 1:
            entry["outputs"] = last
    (golden.path / "records.jsonl").write_text("\n".join(map(json.dumps, entries)) + "\n")
    (check,) = invalid(checked(Golden.open(golden.path), Decoder(), run=False))
    assert check.check == "aliased" and "layers.0 and layers.1, layers.2" in check.says and "clone" in check.says


def test_layers_that_do_nothing_are_no_alias(tmp_path: Path) -> None:
    model = Decoder()
    for layer in model.layers:
        layer.projection.weight.zero_(), layer.projection.bias.zero_()
    assert not invalid(checked(recorded(model, tmp_path / "golden"), model))


def test_a_last_layer_captured_after_the_norm_voids_the_comparison(tmp_path: Path) -> None:
    golden = recorded(Decoder(), tmp_path / "golden")
    entries = [json.loads(line) for line in (golden.path / "records.jsonl").read_text().splitlines()]
    by_name = {entry.get("module"): entry for entry in entries}
    by_name["layers.2"]["outputs"] = by_name["norm"]["outputs"]
    (golden.path / "records.jsonl").write_text("\n".join(map(json.dumps, entries)) + "\n")
    (check,) = invalid(checked(Golden.open(golden.path), Decoder(), run=False))
    assert (check.check, check.module) == ("final-norm", "layers.2") and "after the final norm" in check.says


def test_hooks_that_change_the_outputs_void_the_comparison(tmp_path: Path) -> None:
    model = Decoder()
    golden = recorded(model, tmp_path / "golden")
    norm = model.norm
    forward = norm.forward
    norm.forward = lambda hidden: forward(hidden) * (1.001 if norm._forward_hooks else 1.0)
    (check,) = invalid(checked(golden, model))
    assert check.check == "observer" and "with hooks than without" in check.says


def test_a_candidate_that_differs_from_run_to_run_is_not_blamed_on_hooks(tmp_path: Path) -> None:
    model = Decoder()
    golden = recorded(model, tmp_path / "golden")
    forward = model.norm.forward
    model.norm.forward = lambda hidden: forward(hidden) + torch.rand(())
    checks = checked(golden, model)
    assert not invalid(checks) and "not deterministic" in found(checks, "note")["observer"].says


def test_nan_is_equal_to_itself(tmp_path: Path) -> None:
    model = Decoder()
    golden = recorded(model, tmp_path / "golden")
    model.norm.weight[0] = float("nan")
    assert found(checked(golden, model), "ok")["observer"]


def test_an_output_changed_in_place_before_its_reader_gets_it_is_named(tmp_path: Path) -> None:
    model = Decoder()
    golden = recorded(model, tmp_path / "golden")
    model.between = lambda hidden: hidden.mul_(1.5)
    note = found(checked(golden, model), "note")["in-place"]
    assert note.module == "embed_tokens" and "changed in place before layers.0 got it (3 such places)" in note.says


def test_a_write_that_torch_does_not_see_is_found_by_its_samples(tmp_path: Path) -> None:
    model = Decoder()
    golden = recorded(model, tmp_path / "golden")

    def overwrite(hidden: Any) -> Any:
        hidden.numpy()[...] *= 1.5
        return hidden

    model.between = overwrite
    assert found(checked(golden, model), "note")["in-place"].module == "embed_tokens"


def test_outputs_in_one_buffer_are_aliases_of_the_live_model(tmp_path: Path) -> None:
    model = Decoder(Reused)
    checks = checked(recorded(model, tmp_path / "golden"), model)
    notes = found(checks, "note")
    assert "aliased" in notes or "in-place" in notes
    assert not invalid(checks), "the recorder copies, so what it recorded is sound"


def test_watching_leaves_no_hook_behind_even_after_an_error() -> None:
    model = Decoder()
    with pytest.raises(IndexError), watching(model, lambda name: True):
        model(torch.tensor([[99]]))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_candidate_that_cannot_run_whole_is_a_note(tmp_path: Path) -> None:
    golden = recorded(Decoder(), tmp_path / "golden")
    broken = Decoder()
    broken.lm_head = nn.Linear(3, 3)
    assert "could not be run whole: RuntimeError" in found(checked(golden, broken), "note")["observer"].says


def test_compiled_and_scripted_regions_are_uncovered(tmp_path: Path) -> None:
    model = Decoder(layers=4)
    golden = recorded(model, tmp_path / "golden")
    for index in (1, 2):
        model.layers[index].compile(backend="eager")
    scripted = torch.jit.script(nn.Linear(3, 3))
    model.extra = scripted
    checks = checked(golden, model, run=False)
    gaps = {check.module: check.says for check in checks if check.status == "uncovered"}
    assert gaps["layers.*"].startswith("candidate: 2 modules, the first layers.1: compiled")
    assert "ScriptModule" in gaps["extra"]


def test_modules_without_weights_that_are_never_called_are_no_gap(tmp_path: Path) -> None:
    model = Decoder()
    golden = recorded(model, tmp_path / "golden")
    model.activation = nn.ReLU()
    gaps = [c.module for c in checked(golden, model) if c.status == "uncovered" and c.says.startswith("candidate")]
    assert gaps == ["spare"]


def test_recordings_of_the_same_prompts_in_other_batches_are_alike(tmp_path: Path) -> None:
    rows = tokens(4)
    golden = recorded(Decoder(), tmp_path / "golden", rows)
    other = recorded(Decoder(), tmp_path / "other", rows[2:], rows[:2])
    assert found(sanity_of_recording(golden, other), "ok")["token-ids"].says.endswith("the same 4 prompts")


def test_padding_is_no_token(tmp_path: Path) -> None:
    rows = tokens(2)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.int64), rows], 1)
    golden = recorded(Decoder(), tmp_path / "golden", rows)
    other = recorded(Decoder(), tmp_path / "other", padded, attention_mask=(padded > 0).long())
    assert found(sanity_of_recording(golden, other), "ok")["token-ids"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda rows: torch.cat([torch.ones(2, 1).long(), rows], 1), "only the candidate begins with token 1 (add_bos"),
        (lambda rows: rows[:, 1:], "only the golden begins with token"),
        (lambda rows: rows[:1], "2 prompts in the golden and 1 in the candidate"),
        (lambda rows: rows[:, :-2], "5 tokens in the golden and 3 in the candidate"),
        (lambda rows: rows.index_fill(1, torch.tensor([3]), 0), "token 3 is"),
    ],
)
def test_other_tokens_void_the_comparison_and_say_how_they_differ(tmp_path: Path, change: Any, says: str) -> None:
    golden = recorded(Decoder(), tmp_path / "golden", tokens())
    other = recorded(Decoder(), tmp_path / "other", change(tokens()))
    (check,) = invalid(sanity_of_recording(golden, other))
    assert check.check == "token-ids" and says in check.says


def test_a_smaller_vocabulary_voids_the_comparison(tmp_path: Path) -> None:
    golden = recorded(Decoder(), tmp_path / "golden")
    model = Decoder()
    model.embed_tokens = nn.Embedding(3, 7)
    (check,) = invalid(checked(golden, model, run=False))
    assert "the candidate embeds 3" in check.says


def test_an_incomplete_golden_says_so(tmp_path: Path) -> None:
    golden = recorded(Decoder(), tmp_path / "golden")
    (golden.path / "manifest.json").unlink()
    checks = checked(Golden.open(golden.path), Decoder(), run=False)
    assert "incomplete" in found(checks, "uncovered")["incomplete"].says


def test_layers_of_other_kinds_are_found(tmp_path: Path) -> None:
    class Doubling(Layer):
        def forward(self, hidden: Any) -> Any:
            return super().forward(hidden), hidden.sum()

    model = Decoder(Doubling, layers=2)
    model.forward = lambda input_ids: model.lm_head(  # type: ignore[method-assign]
        model.norm(model.layers[1](model.layers[0](model.embed_tokens(input_ids))[0])[0])
    )
    checks = checked(recorded(model, tmp_path / "golden"), model)
    assert "streams" not in {check.check for check in checks} and found(checks, "ok")["layer-chain"]
