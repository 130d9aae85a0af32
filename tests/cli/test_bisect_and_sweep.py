"""`porter bisect` and `porter align --sweep` from the command line: exit statuses, JSON, and what the reader sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import porter
from porter.cli.app import run
from porter.models.reduce import randomise

SCHEMA = json.loads((Path(__file__).parents[1] / "alignment.schema.json").read_text())

CANDIDATES = """
import torch
from transformers import AutoModelForCausalLM


def right():
    return AutoModelForCausalLM.from_pretrained({checkpoint!r}, dtype=torch.float32)


def wrong_module():
    model = right()
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda hidden: -forward(hidden)
    return model


def wrong_past_9():
    model = right()
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda hidden: forward(hidden) * (1.01 if hidden.shape[1] > 9 else 1.0)
    return model
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, its golden of 6 tokens, and candidates.py."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("regimes")
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )
    randomise(Qwen2ForCausalLM(config)).save_pretrained(folder / "checkpoint")  # type: ignore[no-untyped-call]
    model = Qwen2ForCausalLM.from_pretrained(folder / "checkpoint", dtype=torch.float32)
    porter.capture(model, [[1, 2, 3, 4, 5, 6]], path=folder / "golden", new_tokens=2)
    (folder / "candidates.py").write_text(CANDIDATES.format(checkpoint=str(folder / "checkpoint")))
    return folder


def call(capfd: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, Any, str]:
    """(status, stdout as JSON or text, stderr)."""
    capfd.readouterr()
    status = run([str(a) for a in arguments])
    out, err = capfd.readouterr()
    return status, json.loads(out) if "--json" in arguments and out else out, err


def test_bisect_names_what_to_put_back(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    candidate = f"{folder}/candidates.py:wrong_module"
    status, result, _ = call(capfd, "bisect", folder / "golden", candidate, "--json")
    assert (status, result["schema"], result["matches"]) == (1, "porter.bisection/1", False)
    assert [(part["kind"], part["name"]) for part in result["parts"]] == [("module", "model.layers.1.mlp")]
    assert result["restored"]["kl_mean"] <= result["limit"]["kl_mean"] < result["baseline"]["kl_mean"]
    status, shown, _ = call(capfd, "bisect", folder / "golden", candidate)
    assert status == 1 and shown.startswith("DIFFERS  put back, module model.layers.1.mlp restore")


def test_bisect_of_what_matches_exits_0(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, shown, _ = call(capfd, "bisect", folder / "golden", folder / "checkpoint")
    assert status == 0 and shown.startswith("MATCHES")


def test_sweep_puts_the_regime_in_the_headline(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ("align", folder / "golden", f"{folder}/candidates.py:wrong_past_9")
    assert call(capfd, *arguments)[0] == 0
    status, shown, _ = call(capfd, *arguments, "--sweep")
    assert status == 1
    assert shown.startswith("DRIFT  fails from sequence length 10, prefill; passes at 9: model.layers.0.mlp introduces")
    assert "limited by the model's positions" in shown
    status, report, _ = call(capfd, *arguments, "--sweep", "--json")
    jsonschema.validate(report, SCHEMA)
    assert status == 1 and report["sweep"]["boundary"] == {"axis": "length", "passes": 9, "fails": 10}
    assert report["first_drift"]["module"] == report["sweep"]["first_drift"]["module"] == "model.layers.0.mlp"


def test_sweep_of_a_right_candidate_exits_0(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ("align", folder / "golden", f"{folder}/candidates.py:right", "--sweep", "--sweep-length", "9")
    status, report, _ = call(capfd, *arguments, "--json")
    assert status == 0 and report["sweep"]["failing"] is None and report["sweep"]["longest"] == 9


REFUSED = [
    (("bisect", "GOLDEN", "nowhere"), "nowhere: no such directory"),
    (("bisect", "GOLDEN", "GOLDEN"), "give a model, not a recording"),
    (("bisect", "nowhere", "GOLDEN"), "nowhere: not a golden"),
    (("align", "GOLDEN", "GOLDEN", "--sweep"), "give a model, not a recording"),
    (("align", "GOLDEN", "CHECKPOINT", "--sweep-length", "9"), "--sweep-length: only with --sweep"),
    (("align", "GOLDEN", "CHECKPOINT", "--sweep", "--sweep-length", "17"), "--sweep-length 17: must be 1 to 16"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED)
def test_bad_usage_is_one_line_and_exit_2(
    folder: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    known = {"GOLDEN": folder / "golden", "CHECKPOINT": folder / "checkpoint"}
    status, out, err = call(capfd, *(known.get(a, a) for a in arguments))
    assert (status, out) == (2, "")
    line = err.strip().splitlines()[-1]
    assert line.startswith("porter: ") and words in line and "Traceback" not in err
