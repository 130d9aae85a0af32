"""A golden whose fields are of the wrong type is refused by file, line and field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from porter.cli.app import run
from porter.golden.capture import capture
from porter.golden.store import Golden

Build = Callable[..., nn.Module]


@pytest.fixture
def golden(qwen3: Build, tmp_path: Path) -> Path:
    capture(qwen3(), torch.tensor([[1, 2, 3]]), tmp_path / "golden", 2, modules=r"layers\.0\.mlp", store_weights=True)
    return tmp_path / "golden"


def edit(file: Path, place: list[Any], value: Any, line: int = 0) -> None:
    """Set one field of a JSON file, or of one line of a .jsonl file."""
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    content = json.loads(lines[line])
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    lines[line] = json.dumps(content)
    file.write_text("\n".join(lines) + "\n")


WRONG = [
    ("manifest.json", ["detail"], "whole", "manifest.json: detail is whole; must be one of full, sketch, stats"),
    ("manifest.json", ["dtype"], "bf17", "manifest.json: dtype is 'bf17', expected a dtype of torch; record the"),
    ("manifest.json", ["complete"], 1, "manifest.json: complete is 1, expected true or false"),
    ("manifest.json", ["batches", 0, "tokens"], [["a"]], "manifest.json: batches[0].tokens[0][0] is 'a', expected"),
    ("manifest.json", ["batches", 0, "generated"], None, "manifest.json: batches[0].generated is None, expected a"),
    ("manifest.json", ["model", "digests"], [], "manifest.json: model.digests is [], expected an object or null"),
    ("manifest.json", ["model"], "Qwen3", "manifest.json: model is 'Qwen3', expected an object"),
    ("manifest.json", ["environment"], None, "manifest.json: environment is None, expected an object"),
    ("records.jsonl", ["step"], -1, "records.jsonl:1: step is -1, expected a count"),
    ("records.jsonl", ["inputs", "dict", "args", "list"], {}, "records.jsonl:1: inputs.dict.args.list is {}, expected"),
    ("records.jsonl", ["inputs", "dict"], {}, "records.jsonl:1: inputs.dict.args is missing"),
    ("records.jsonl", ["outputs"], {"x": 1}, "records.jsonl:1: outputs is {'x': 1}, expected a tensor, value, list"),
    ("records.jsonl", ["outputs", "shape"], "x", "records.jsonl:1: outputs.shape is 'x', expected a list of counts"),
    ("records.jsonl", ["outputs", "stats"], [], "records.jsonl:1: outputs.stats is [], expected an object"),
    ("records.jsonl", ["outputs", "stride"], [1], "records.jsonl:1: outputs.stride is [1], expected 3 strides"),
    ("tensors.jsonl", ["offset"], 1.5, "tensors.jsonl:1: offset is 1.5, expected a count"),
    ("tensors.jsonl", ["bytes"], 3, "tensors.jsonl:1: bytes is 3, which is not int64 [1, 3]"),
    ("tensors.jsonl", ["dtype"], "matmul", "tensors.jsonl:1: dtype is 'matmul', expected a dtype of torch"),
    ("tensors.jsonl", ["extra"], 1, "tensors.jsonl:1: unknown fields ['extra']"),
]


@pytest.mark.parametrize(("file", "place", "value", "words"), WRONG)
def test_wrong_types_are_named(
    file: str, place: list[Any], value: Any, words: str, golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(golden / file, place, value)
    assert run(["golden", "show", str(golden)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"porter: {golden}/") and words in line


def test_missing_fields_are_named(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = json.loads((golden / "manifest.json").read_text())
    del manifest["batches"]
    (golden / "manifest.json").write_text(json.dumps(manifest))
    assert run(["golden", "show", str(golden)]) == 2
    assert capsys.readouterr().err.strip().endswith("manifest.json: batches is missing; record the golden again")


def test_values_that_cannot_be_rebuilt_are_refused(golden: Path) -> None:
    from porter.errors import PorterError

    opened = Golden.open(golden)
    for node in (
        {"value": "float17", "type": "dtype"},
        {"value": "toaster", "type": "device"},
        {"value": 3, "type": "chair"},
        {"dict": {}, "class": "transformers.no_such_module.Output"},
        {"dict": {"wrong": {"value": 1}}, "class": "transformers.modeling_outputs.BaseModelOutput"},
    ):
        with pytest.raises(PorterError, match="record the golden again"):
            opened.value(node)


@pytest.mark.parametrize("detail", ["full", "sketch", "stats"])
def test_what_is_recorded_passes(detail: str, qwen3: Build, deepseek_v3: Build, tmp_path: Path) -> None:
    for number, model in enumerate((qwen3(), deepseek_v3(), nn.Linear(3, 2))):
        if hasattr(model, "config"):
            capture(model, torch.tensor([[1, 2]]), tmp_path / f"{number}", 2, detail=detail, store_weights=False)
        else:
            from porter.golden.recorder import recording

            with recording(model, tmp_path / f"{number}", detail=detail):
                model(torch.full((1, 3), float("inf")))
        assert Golden.open(tmp_path / f"{number}").complete
