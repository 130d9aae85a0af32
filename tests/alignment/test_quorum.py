"""Several goldens of the same tokens: the odd one out is named, with an oracle and without; no majority, no verdict."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import porter
from porter.alignment.quorum import hold_vote
from porter.cli.app import run
from porter.errors import PorterError
from porter.golden.store import Golden

TOKENS = torch.tensor([[5, 11, 2, 40, 7, 23, 1], [9, 9, 3, 17, 30, 2, 50]])
LAYER = "model.layers.1.self_attn"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    settings = dict(
        vocab_size=61, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.3,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("quorum") / "checkpoint"
    Qwen3ForCausalLM(Qwen3Config(**settings)).save_pretrained(path)
    return path


def _model(checkpoint: Path, dtype: str = "float32") -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()


def _wrong(model: Any, scale: float = 2.0) -> Any:
    model.get_submodule(LAYER).scaling *= scale
    return model


def _recorded(model: Any, path: Path, **options: Any) -> Golden:
    return porter.capture(model, TOKENS, path, new_tokens=2, **options)


@pytest.fixture(scope="module")
def goldens(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Golden]:
    """Of one checkpoint: in two precisions, and by implementations with two kinds of faults in one attention."""
    folder = tmp_path_factory.mktemp("goldens")
    models = {
        "fp32": _model(checkpoint),
        "again": _model(checkpoint),
        "bf16": _model(checkpoint, "bfloat16"),
        "wrong": _wrong(_model(checkpoint)),
        "wrong-too": _wrong(_model(checkpoint, "bfloat16")),
        "otherwise": _wrong(_model(checkpoint), 0.4),
    }
    return {name: _recorded(model, folder / name) for name, model in models.items()}


@pytest.fixture(scope="module")
def unreferenced(goldens: dict[str, Golden], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Golden]:
    """The same without a model that could be rebuilt."""
    import shutil

    folder, found = tmp_path_factory.mktemp("unreferenced"), {}
    for name, golden in goldens.items():
        shutil.copytree(golden.path, folder / name)
        manifest = json.loads((folder / name / "manifest.json").read_text())
        manifest["model"] |= {"class": "vendor.Model", "checkpoint": None, "digests": None, "weights": False}
        (folder / name / "manifest.json").write_text(json.dumps(manifest))
        found[name] = Golden.open(folder / name)
    return found


CASES = [
    (("fp32", "again", "bf16"), (0, 1, 2), []),
    (("fp32", "bf16"), (0, 1), []),
    (("wrong", "fp32", "bf16"), (1, 2), [(LAYER, (0,))]),
    (("fp32", "wrong", "bf16"), (0, 2), [(LAYER, (1,))]),
    # What the majority does counts, not what the oracle does: the source may be the one that is wrong.
    (("fp32", "wrong", "wrong-too"), (1, 2), [(LAYER, (0,))]),
    (("fp32", "wrong", "otherwise"), (), [(LAYER, (0, 1, 2))]),
    (("wrong", "bf16"), (), [(LAYER, (0, 1))]),
]


@pytest.mark.parametrize(("names", "kept", "splits"), CASES)
def test_vote_by_the_oracle(
    goldens: dict[str, Golden], names: tuple[str, ...], kept: tuple[int, ...], splits: list[Any]
) -> None:
    vote = hold_vote([goldens[name] for name in names], 2.0)
    assert vote.oracle and (vote.kept, list(vote.splits)) == (kept, splits)


@pytest.mark.parametrize(("names", "kept", "splits"), CASES)
def test_vote_in_pairs(
    unreferenced: dict[str, Golden], names: tuple[str, ...], kept: tuple[int, ...], splits: list[Any]
) -> None:
    vote = hold_vote([unreferenced[name] for name in names], 2.0)
    assert not vote.oracle and (vote.kept, list(vote.splits)) == (kept, splits)


def test_report_names_the_odd_one_out(checkpoint: Path, goldens: dict[str, Golden]) -> None:
    also = [goldens["fp32"], goldens["bf16"]]
    report = porter.align(goldens["wrong"], _model(checkpoint), also=also)
    assert report.verdict == "aligned"
    told = report.sanity[0]
    assert (told.check, told.module, told.status) == ("quorum", LAYER, "note")
    assert told.says.startswith(f"2 of 3 goldens agree; {goldens['wrong'].path} disagrees first at {LAYER}")
    assert "the golden may be the one that is wrong" in told.says
    drifting = porter.align(goldens["wrong"], _wrong(copy.deepcopy(_model(checkpoint))), also=also)
    assert drifting.verdict == "drift" and drifting.first_drift is not None and drifting.first_drift.module == LAYER


def test_no_majority_is_incomparable(checkpoint: Path, goldens: dict[str, Golden]) -> None:
    report = porter.align(goldens["wrong"], _model(checkpoint), also=[goldens["otherwise"]])
    assert report.verdict == "incomparable" and not report.modules
    assert report.sanity[0].status == "invalid" and "no majority" in report.sanity[0].says


def test_goldens_that_cannot_vote(checkpoint: Path, goldens: dict[str, Golden], tmp_path: Path) -> None:
    stats = _recorded(_model(checkpoint), tmp_path / "stats", detail="stats")
    other = porter.capture(_model(checkpoint), TOKENS + 1, tmp_path / "other", new_tokens=2)
    for wrong, message in ((stats, "recorded as stats"), (other, "recorded on other tokens")):
        with pytest.raises(PorterError, match=message):
            hold_vote([goldens["fp32"], wrong], 2.0)
    with pytest.raises(PorterError, match="named twice"):
        hold_vote([goldens["fp32"], goldens["bf16"], goldens["bf16"]], 2.0)


def test_command(checkpoint: Path, goldens: dict[str, Golden], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["align", str(goldens["wrong"].path), str(checkpoint), "--dtype", "float32"]
    also = ["--also", str(goldens["fp32"].path), "--also", str(goldens["bf16"].path)]
    assert run([*command, *also]) == 0
    assert "2 of 3 goldens agree" in " ".join(capsys.readouterr().out.split())
    assert run([*command, "--also", command[1]]) == 2
    assert "cannot confirm itself" in capsys.readouterr().err
    assert run([*command, *also, "--sweep"]) == 2
