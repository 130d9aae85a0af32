"""`porter golden capture` and `show`: results, exit statuses, one-line refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from porter.cli.app import run
from porter.golden.store import Golden
from porter.models.presets import shipped_directory

TINY = "tiny-qwen3"
Build = Callable[..., nn.Module]


@pytest.fixture
def checkpoint(qwen3: Build, tmp_path: Path) -> Path:
    model: Any = qwen3()
    model.save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def _json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_capture_and_show_a_shipped_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "golden"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time\nIt was\n")
    command = ["golden", "capture", TINY, "--output", str(output), "--prompts", str(prompts), "--new-tokens", "2"]
    assert run([*command, "--modules", r"layers\.0\.", "--detail", "sketch", "--json"]) == 0
    captured = _json(capsys)
    assert captured["complete"] and captured["steps"] == 2 and captured["prompts"] == ["Once upon a time", "It was"]
    assert captured["model"]["checkpoint"] == str(shipped_directory(TINY))
    golden = Golden.open(output)
    assert golden.generated == captured["generated"] and golden.detail == "sketch"
    assert all(record.module.startswith("model.layers.0.") or not record.module for record in golden.records)
    assert run(["golden", "show", str(output), "--json"]) == 0
    assert _json(capsys) == captured
    assert run(["golden", "show", str(output)]) == 0
    assert "complete" in capsys.readouterr().out


def test_jsonl_batches_and_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one two three four five six", "id": 1}\n{"prompt": "one"}\n{"prompt": "two"}\n')
    command = ["golden", "capture", TINY, "--output", str(tmp_path / "golden"), "--prompts", str(prompts)]
    assert run([*command, "--batch-size", "2", "--max-length", "3", "--dtype", "float32", "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["batches"] == 2 and result["dtype"] == "float32" and "cut to 3 tokens" in captured.err
    assert max(len(row) for row in result["tokens"]) == 3


def test_tokens_need_no_tokenizer(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text("[[1, 2, 3], [4]]")
    command = ["golden", "capture", str(checkpoint), "--output", str(tmp_path / "golden")]
    assert run([*command, "--prompt", "hello"]) == 2
    assert "--tokens" in capsys.readouterr().err
    assert run([*command, "--tokens", str(tokens), "--json"]) == 0
    assert _json(capsys)["tokens"] == [[1, 2, 3], [0, 0, 4]]
    assert run([*command, "--tokens", str(tokens), "--json"]) == 0, "the same request again has nothing left to do"


def test_not_finite_values_are_named(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(checkpoint / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(state, checkpoint / "model.safetensors", {"format": "pt"})
    (tmp_path / "tokens.json").write_text("[[1, 2]]")
    command = ["golden", "capture", str(checkpoint), "--output", str(tmp_path / "golden"), "--json"]
    assert run([*command, "--tokens", str(tmp_path / "tokens.json"), "--detail", "stats"]) == 0
    assert _json(capsys)["not_finite"] == {
        "module": "model.layers.1.mlp.up_proj", "step": 0, "call": 0, "nan": 2, "inf": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "option", "message"),
    [
        ("", "--prompts", "no prompts"),
        ("one\n\ntwo\n", "--prompts", "prompts:2: the prompt is empty"),
        ('{"prompt": "a"}\n{"text": "b"}\n', "--prompts", "prompts:2: no text in the field `prompt`"),
        ('{"prompt": "a"}\nplain\n', "--prompts", "prompts:2: not JSON"),
        ('{"prompt": ""}\n', "--prompts", "prompts:1: the prompt is empty"),
        ("{", "--tokens", "not JSON"),
        ("[]", "--tokens", "non-empty list of token-id lists"),
        ("[1, 2]", "--tokens", "non-empty list of token-id lists"),
        ("[[1], []]", "--tokens", "list 1 is empty"),
        ('[[1, "a"]]', "--tokens", "list 0 holds 'a'"),
        ("[[1, true]]", "--tokens", "list 0 holds True"),
        ("[[1, 99999999]]", "--tokens", "token id 99999999 is outside the model's vocabulary"),
    ],
)
def test_bad_prompts(
    content: str, option: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts").write_text(content)
    output = tmp_path / "golden"
    assert run(["golden", "capture", TINY, "--output", str(output), option, str(tmp_path / "prompts")]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("porter: ") and message in error
    assert not output.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give exactly one of --prompts, --prompt and --tokens, not none"),
        (["--prompt", "a", "--tokens", "b.json"], "not --prompt and --tokens"),
        (["--prompt", "  "], "--prompt is empty"),
        (["--prompts", "no/such/file"], "--prompts no/such/file: No such file"),
        (["--prompt", "a", "--detail", "all"], "expected one of full, sketch, stats"),
        (["--prompt", "a", "--modules", "["], "not a regular expression"),
        (["--prompt", "a", "--dtype", "int8"], "expected one of auto, float32"),
        (["--prompt", "a", "--new-tokens", "2000"], "--new-tokens 2000: with the 1 tokens of prompt 0 above the"),
        (["--prompt", "ab" * 600], "with the 1200 tokens of prompt 0 above the model's 1024 positions"),
        (["--prompt", "a", "--new-tokens", "-1"], "'--new-tokens': Input should be greater"),
        (["--prompt", "a", "--device", "toaster"], "--device toaster: not usable here"),
    ],
)
def test_bad_options(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "golden"
    assert run(["golden", "capture", TINY, "--output", str(output), *arguments]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert not output.exists()


def test_bad_models_and_directories(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokens.json").write_text("[[1, 2]]")
    request = ["--tokens", str(tmp_path / "tokens.json")]

    def refused(model: Path | str, output: Path) -> str:
        assert run(["golden", "capture", str(model), "--output", str(output), *request]) == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "thesis.txt").write_text("mine")
    assert "files that are not a golden's" in refused(checkpoint, occupied)
    assert (occupied / "thesis.txt").read_text() == "mine"
    assert "deepseek-v3: a preset has no weights" in refused("deepseek-v3", tmp_path / "golden")
    assert "no/such/model" in refused("no/such/model", tmp_path / "golden")
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    assert "parameters are not in the checkpoint" in refused(broken, tmp_path / "golden")
    (broken / "model.safetensors").unlink()
    assert "no *.safetensors" in refused(broken, tmp_path / "golden")
    assert not (tmp_path / "golden").exists()
    assert run(["golden", "show", str(tmp_path)]) == 2
    assert "not a golden" in capsys.readouterr().err


def test_a_dtype_may_have_the_name_that_adapt_gives_it(tmp_path: Path) -> None:
    options = ["--prompt", "a", "--dtype", "bf16", "--output", str(tmp_path / "g")]
    assert run(["golden", "capture", "tiny-qwen3", *options]) == 0
    assert Golden.open(tmp_path / "g").manifest["dtype"] == "bfloat16"
