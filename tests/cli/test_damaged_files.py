"""Whatever is changed in a JSON file that porter reads, the user sees an answer or one line, never a traceback."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import porter
from porter.cli.app import run
from porter.models.presets import shipped_directory

MODEL = "tiny-qwen3"
STRANGE = [None, True, 0, -1, 3, 10**9, 10**30, 1.5, float("nan"), "", "x", "../x", [], [1], ["x"], [[]], {}, {"x": 1}]
REMOVED = object()

Path_ = tuple[Any, ...]


def places(document: Any, path: Path_ = ()) -> Iterator[Path_]:
    """The path of every value inside a JSON document."""
    keys = document if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    for key in keys:
        yield (*path, key)
        yield from places(document[key], (*path, key))


def changed(document: Any, path: Path_, value: Any) -> Any:
    """A copy of `document` with the value at `path` replaced, or removed."""
    result = copy.deepcopy(document)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    if value is REMOVED:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return result


def answer(*arguments: Any) -> tuple[int, list[str]]:
    """Exit status, and porter's own lines on stderr, of one command; a traceback or a hint to --debug fails."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run([str(argument) for argument in arguments])
    lines = [line for line in err.getvalue().splitlines() if line.startswith("porter: ")]
    assert "Traceback" not in out.getvalue() + err.getvalue()
    assert status in (0, 1, 2) and len(lines) == (status != 0), (status, err.getvalue())
    assert not any("--debug" in line or len(line) > 1000 for line in lines), lines
    return status, lines


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in two shards, a port of it and a golden."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("store")
    source = shipped_directory(MODEL)
    assert source is not None
    shutil.copytree(source, folder / "checkpoint")
    (folder / "checkpoint" / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(folder / "checkpoint", max_shard_size="800KB")
    assert (folder / "checkpoint" / "model.safetensors.index.json").is_file()
    porter.adapt(MODEL, "cpu", output=folder / "port")
    command = ["golden", "capture", MODEL, "--output", str(folder / "golden"), "--prompt", "Once", "--new-tokens", "2"]
    assert run([*command, "--modules", r"layers\.0\.mlp"]) == 0
    return folder


CASES = {
    "checkpoint/config.json": ("adapt", "checkpoint", "--target", "cpu", "--plan"),
    "checkpoint/generation_config.json": ("adapt", "checkpoint", "--target", "cpu", "--plan"),
    "checkpoint/model.safetensors.index.json": ("adapt", "checkpoint", "--target", "cpu", "--output", "new"),
    "port/port.json": ("run", "port", "Once", "--new-tokens", "1"),
    "port/config.json": ("run", "port", "Once", "--new-tokens", "1"),
    "port/generation_config.json": ("run", "port", "Once", "--new-tokens", "1"),
    "port/tokenizer.json": ("run", "port", "Once", "--new-tokens", "1"),
    "golden/manifest.json": ("golden", "show", "golden"),
    "golden/records.jsonl": ("golden", "show", "golden"),
    "golden/tensors.jsonl": ("golden", "show", "golden"),
}


@contextlib.contextmanager
def damaged(file: Path, change: Callable[[Any], Any]) -> Iterator[None]:
    """The JSON file, or one line of a .jsonl file, changed while the context lasts."""
    whole = file.read_text(encoding="utf-8")
    lines = whole.splitlines() if file.suffix == ".jsonl" else [whole]
    lines[0] = json.dumps(change(json.loads(lines[0])))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(whole, encoding="utf-8")


@pytest.mark.parametrize("name", CASES)
def test_changed_fields(name: str, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(store)
    file = store / name
    text = file.read_text(encoding="utf-8")
    document = json.loads(text.splitlines()[0] if file.suffix == ".jsonl" else text)

    @settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(list(places(document))), st.sampled_from([REMOVED, *STRANGE]))
    def check(path: Path_, value: Any) -> None:
        with damaged(file, lambda content: changed(content, path, value)):
            answer(*CASES[name])
        shutil.rmtree(store / "new", ignore_errors=True)

    check()
    assert answer(*CASES[name])[0] == 0
    shutil.rmtree(store / "new", ignore_errors=True)
