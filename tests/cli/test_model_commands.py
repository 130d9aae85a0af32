"""adapt, run, bench, eval and models, as a script sees them: JSON on stdout, one line and a status when refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from porter.cli.app import run

Make = Callable[..., Path]


@pytest.fixture
def porter(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any, str]]:
    """porter("adapt", ...) -> (status, stdout as JSON or text, stderr)."""

    def call(*arguments: Any) -> tuple[int, Any, str]:
        capfd.readouterr()
        status = run([str(a) for a in arguments])
        out, err = capfd.readouterr()
        return status, json.loads(out) if "--json" in arguments and out else out, err

    return call


def test_adapt_run_eval_bench(porter: Any, tmp_path: Path) -> None:
    port = tmp_path / "port"
    status, adapted, _ = porter("adapt", "tiny-qwen3", "--target", "cpu", "--output", port, "--json")
    assert status == 0 and adapted["output"] == str(port)
    assert max(adapted["proof"].values()) < 1e-9

    status, ran, _ = porter("run", port, "The ", "--new-tokens", "5", "--json")
    assert status == 0 and 1 <= len(ran["tokens"]) <= 5
    status, text, _ = porter("run", port, "The ", "--new-tokens", "5", "--stream")
    assert status == 0 and text.strip() == ("The " + ran["text"]).strip()

    original = json.loads((port / "port.json").read_text())["source"]["model"]
    from porter.models.presets import shipped_directory

    source = shipped_directory(original)
    assert source is not None
    words = tmp_path / "words.txt"
    words.write_text("It was a truth universally acknowledged. " * 8)
    status, measured, _ = porter("eval", port, "--against", source, "--text", words, "--tokens", "64", "--json")
    assert status == 0 and measured["tokens"] == 63 and abs(measured["perplexity_ratio"] - 1) < 0.02

    options = ("--prompt-tokens", "4", "--new-tokens", "3", "--repeats", "1", "--threads", "1")
    status, timed, _ = porter("bench", port, "--against", source, *options, "--json")
    assert status == 0 and timed["speedup"] > 0
    assert [t["label"] for t in timed["timings"]] == ["porter bf16", "transformers fp32", "transformers bf16"]


def test_models_lists_families(porter: Any) -> None:
    status, listed, _ = porter("models", "--json")
    assert status == 0
    assert {f["family"] for f in listed["families"]} == {"qwen2", "qwen3", "deepseek_v3"}


REFUSED = [
    (("adapt", "no-such-model", "--target", "cpu"), "no-such-model"),
    (("adapt", "qwen3-8b", "--target", "abacus"), "abacus"),
    (("adapt", "qwen3-8b", "--target", "ascend", "--plan"), "no op provider for ascend-910b"),
    (("adapt", "qwen3-8b", "--target", "cpu", "--tp", "8"), "--tp and --ep"),
    (("adapt", "qwen3-8b", "--target", "cpu", "--scheme", "w3"), "--scheme w3"),
    (("adapt", "tiny-qwen3"), "target"),
    (("run", "nowhere"), "nowhere/port.json: not found"),
    (("run", "nowhere", "x", "--new-tokens", "0"), "--new-tokens 0"),
    (("bench", "nowhere", "--new-tokens", "1"), "--new-tokens at least 2"),
    (("eval", "nowhere", "--against", "x", "--text", "y"), "y: not found"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED)
def test_bad_usage_is_one_line_and_exit_2(porter: Any, arguments: tuple[str, ...], words: str) -> None:
    status, out, err = porter(*arguments)
    assert (status, out) == (2, "")
    line = err.strip().splitlines()[-1]
    assert line.startswith("porter: ") and words in line and "Traceback" not in err
