"""adapt, run, bench, eval and models, as a script sees them: JSON on stdout, one line and a status when refused."""

from __future__ import annotations

import json
import shutil
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


def test_models_tells_support_by_chip_with_its_evidence(porter: Any) -> None:
    status, listed, _ = porter("models", "qwen3", "--json")
    assert status == 0
    (family,) = listed["families"]
    assert "tiny-qwen3-next" in listed["shipped"]
    chips = {chip["chip"]: chip for chip in family["chips"]}
    cpu = chips["cpu-x86-avx2"]
    assert (cpu["native"], cpu["ops"], cpu["evidence"]) == (
        cpu["ops"],
        len(cpu["reference"]) + cpu["native"],
        "measured",
    )
    assert (chips["metax-c550"]["native"], chips["metax-c550"]["evidence"]) == (0, "none")
    assert len(chips["metax-c550"]["reference"]) == cpu["ops"]
    ascend = chips["ascend-910b"]
    assert (ascend["evidence"], ascend["rungs"]) == ("declared", {"emulated": ascend["native"] - 1, "declared": 1})
    assert chips["ascend-310p"]["native"] < cpu["ops"]


REFUSED = [
    (("adapt", "no-such-model", "--target", "cpu", "--plan"), "no-such-model"),
    (("adapt", "qwen3-8b", "--target", "abacus", "--plan"), "abacus"),
    (("adapt", "qwen3-8b", "--target", "metax-c550", "--plan"), "no op provider for metax-c550"),
    (("adapt", "tiny-qwen3", "--target", "ascend-310p", "--plan"), "no bfloat16 (it has float32, float16, int8); give"),
    (("adapt", "tiny-qwen3", "--target", "ascend-310p", "--dtype", "fp32", "--plan"), "--scheme bf16: ascend-310p has"),
    (("adapt", "qwen3-8b", "--target", "cpu", "--tp", "8"), "--tp and --ep"),
    (("adapt", "qwen3-8b", "--target", "cpu", "--scheme", "w3", "--plan"), "--scheme w3"),
    (("adapt", "tiny-qwen3"), "target"),
    (("adapt", "tiny-qwen3", "--target", "cpu"), "--output is missing"),
    (("adapt", "no-such-model", "--target", "cpu", "--output", Path(__file__).parent), "already exists"),
    (("run", "nowhere"), "nowhere/port.json: not found"),
    (("run", "nowhere", "x", "--new-tokens", "0"), "--new-tokens 0"),
    (("run", "nowhere", "--draft-tokens", "2"), "--draft-tokens: tokens are drafted with --speculative"),
    (("run", "nowhere", "--speculative", "--draft-tokens", "0"), "--draft-tokens 0: must be at least 1"),
    (("bench", "nowhere", "--new-tokens", "1"), "--new-tokens at least 2"),
    (("eval", "nowhere", "--against", "x", "--text", "y"), "y: not found"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED)
def test_bad_usage_is_one_line_and_exit_2(porter: Any, arguments: tuple[str, ...], words: str) -> None:
    status, out, err = porter(*arguments)
    assert (status, out) == (2, "")
    line = err.strip().splitlines()[-1]
    assert line.startswith("porter: ") and words in line and "Traceback" not in err


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A checkpoint with one NaN weight."""
    from safetensors.torch import load_file, save_file

    from porter.models.presets import shipped_directory

    source = shipped_directory("tiny-qwen3")
    assert source is not None
    shutil.copytree(source, tmp_path / "broken")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, tmp_path / "broken" / "model.safetensors", {"format": "pt"})
    return tmp_path / "broken"


def test_models_that_compute_nan_are_answered_with_no(porter: Any, broken: Path, tmp_path: Path) -> None:
    good, bad, text = tmp_path / "good", tmp_path / "bad", tmp_path / "text"
    text.write_text("It was a truth universally acknowledged.")
    assert porter("adapt", "tiny-qwen3", "--target", "cpu", "--output", good)[0] == 0
    assert porter("adapt", broken, "--target", "cpu", "--output", bad, "--allow-nonfinite")[0] == 0
    bench = ("--prompt-tokens", "2", "--new-tokens", "2", "--repeats", "1")
    for arguments, whose in (
        (("eval", bad, "--against", "tiny-qwen3", "--text", text), "the port"),
        (("eval", good, "--against", broken, "--text", text), "the original"),
        (("run", bad), "the model"),
        (("bench", bad, *bench), "the model"),
        (("bench", good, "--against", broken, *bench), "transformers fp32"),
    ):
        status, out, err = porter(*arguments)
        line = err.strip().splitlines()[-1]
        assert (status, out) == (1, ""), arguments
        assert line.startswith(f"porter: {whose}: ") and "logits are NaN or infinite" in line


def test_texts_and_paths_that_cannot_be_used(porter: Any, tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9 au lait")
    for arguments, words in (
        (("eval", "port", "--against", "tiny-qwen3", "--text", latin), "latin.txt: byte 3 is not UTF-8"),
        (("adapt", "x" * 5000, "--target", "cpu", "--plan"), "File name too long"),
        (("golden", "show", "x" * 5000), "File name too long"),
        (("run", "x" * 5000), "File name too long"),
    ):
        status, out, err = porter(*arguments)
        line = err.strip().splitlines()[-1]
        assert (status, out) == (2, "") and line.startswith("porter: ") and words in line and "--debug" not in line
        assert len(line) < 400


def test_fallbacks_are_told_once_per_reason_and_strict_answers_no(
    porter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from porter.kernels.registry import default_registry

    port = tmp_path / "port"
    porter("adapt", "tiny-qwen3", "--target", "cpu", "--output", port)
    library = default_registry().providers["cpu"].library  # type: ignore[attr-defined]
    monkeypatch.setattr(library, "loaded", False)
    monkeypatch.setattr(library, "reason", "no compiler here")
    status, _, err = porter("run", port, "The ", "--new-tokens", "2")
    told = [line for line in err.splitlines() if line.startswith("fallback")]
    assert status == 0 and len(told) == 1
    assert "rms_norm/standard, rope/half, swiglu/standard: cpu refuses: no compiler here" in told[0]
    status, out, err = porter("run", port, "The ", "--new-tokens", "2", "--strict")
    line = err.strip().splitlines()[-1]
    assert (status, out) == (1, "") and line.startswith("porter: --strict: ") and "no compiler here" in line
