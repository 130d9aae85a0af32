"""A golden cut off anywhere opens with what was whole, or is refused by name."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from porter.errors import PorterError
from porter.golden.capture import capture
from porter.golden.node import tensor_nodes
from porter.golden.recorder import recording
from porter.golden.sketch import relative_error, sketch
from porter.golden.store import Golden

Build = Callable[..., nn.Module]


@pytest.fixture(scope="module")
def whole(qwen3: Build, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    path = tmp_path_factory.mktemp("store") / "golden"
    return capture(qwen3(), [[1, 2, 3]], path, new_tokens=2)


def _interrupted(whole: Golden, path: Path) -> Path:
    shutil.copytree(whole.path, path)
    (path / "manifest.json").unlink()
    return path


@pytest.mark.parametrize("file", ["records.jsonl", "tensors.jsonl", "tensors.bin"])
@pytest.mark.parametrize("kept", [0.0, 0.003, 0.2, 0.501, 0.73, 0.99, 1.0])
def test_any_prefix_of_any_file(file: str, kept: float, whole: Golden, tmp_path: Path) -> None:
    """Whatever survives equals the whole golden's records, tensors included, up to where it stops."""
    path = _interrupted(whole, tmp_path / "golden")
    content = (path / file).read_bytes()
    (path / file).write_bytes(content[: int(len(content) * kept)])
    try:
        golden = Golden.open(path)
    except PorterError as error:
        assert kept < 0.1 and "before its first record" in str(error)
        return
    assert not golden.complete and golden.manifest["incomplete"].startswith("the recording stopped")
    assert golden.records == whole.records[: len(golden.records)]
    assert len(golden.records) == len(whole.records) or kept < 1
    assert golden.steps == sum(record.module == "" for record in golden.records)
    for record in golden.records:
        for node in [*tensor_nodes(record.inputs), *tensor_nodes(record.outputs)]:
            assert torch.equal(golden.tensor(node["tensor"]), whole.tensor(node["tensor"]))


@pytest.mark.parametrize("file", ["records.jsonl", "tensors.jsonl", "tensors.bin"])
def test_a_complete_golden_that_lost_data_is_refused(file: str, whole: Golden, tmp_path: Path) -> None:
    shutil.copytree(whole.path, tmp_path / "golden")
    content = (tmp_path / "golden" / file).read_bytes()
    (tmp_path / "golden" / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(PorterError, match="damaged"):
        Golden.open(tmp_path / "golden")


def test_what_is_not_a_golden_is_refused(whole: Golden, tmp_path: Path) -> None:
    with pytest.raises(PorterError, match="not a golden"):
        Golden.open(tmp_path / "nowhere")
    shutil.copytree(whole.path, tmp_path / "golden")
    manifest = tmp_path / "golden" / "manifest.json"
    manifest.write_text(json.dumps(whole.manifest | {"schema": "porter.golden/9"}))
    with pytest.raises(PorterError, match=r"schema is 'porter\.golden/9', expected 'porter\.golden/1'"):
        Golden.open(tmp_path / "golden")
    manifest.write_text("{")
    with pytest.raises(PorterError, match=r"manifest\.json: not readable as JSON"):
        Golden.open(tmp_path / "golden")


def test_tensors_are_fresh_copies(whole: Golden) -> None:
    id = next(tensor_nodes(whole.records[-1].outputs))["tensor"]
    first = whole.tensor(id)
    first.zero_()
    assert whole.tensor(id).abs().sum() > 0


def test_what_a_level_of_detail_does_not_hold(qwen3: Build, tmp_path: Path) -> None:
    sketched = capture(qwen3(vocab_size=2000), [[1] * 40], tmp_path / "sketch", detail="sketch")
    logits = next(tensor_nodes(sketched.records[-1].outputs))
    assert len(sketched.sketch(logits["tensor"]).values) == 509 and logits["shape"] == [1, 40, 2000]
    assert sketched.sketch(logits["tensor"]).norm == logits["stats"]["l2"]
    with pytest.raises(PorterError, match="recorded as a sketch"):
        sketched.tensor(logits["tensor"])
    small = next(tensor_nodes(sketched.records[0].inputs))
    assert torch.equal(sketched.tensor(small["tensor"]), torch.ones(1, 40, dtype=torch.int64))
    stats = capture(qwen3(), [[1]], tmp_path / "stats", detail="stats")
    node = next(tensor_nodes(stats.records[-1].outputs))
    assert node["tensor"] is None and node["stats"]["l2"] > 0
    with pytest.raises(PorterError, match="statistics alone"):
        stats.value(stats.records[-1].outputs)


def test_sketch_of_a_tensor_that_is_not_finite(tmp_path: Path) -> None:
    values = torch.ones(200, 200)
    values[3, 4] = float("inf")
    with recording(nn.Identity(), tmp_path / "golden", detail="sketch") as recorder:
        recorder.model(values)
    golden = Golden.open(tmp_path / "golden")
    node = golden.records[0].outputs
    assert (node["stats"]["inf"], node["stats"]["max"]) == (1, 1.0)
    estimate, error = relative_error(sketch(torch.ones(200, 200)), golden.sketch(node["tensor"]))
    assert math.isnan(estimate) and math.isnan(error)


def test_digests_tell_equal_runs_from_different_ones(qwen3: Build, tmp_path: Path) -> None:
    def digests(name: str, detail: str, seed: int) -> list[str]:
        golden = capture(qwen3(seed), [[1] * 9], tmp_path / name, detail=detail, store_weights=False)
        return [node["digest"] for record in golden.records for node in tensor_nodes(record.outputs)]

    for detail in ("full", "sketch", "stats"):
        first = digests(f"{detail}-a", detail, 0)
        assert first == digests(f"{detail}-b", detail, 0)
        assert first[-1] != digests(f"{detail}-c", detail, 1)[-1]


@pytest.mark.parametrize("detail", ["full", "sketch"])
def test_changed_bytes_are_found_when_read(detail: str, qwen3: Build, tmp_path: Path) -> None:
    golden = capture(qwen3(vocab_size=2000), [[1] * 40], tmp_path / "golden", detail=detail)
    id = next(tensor_nodes(golden.records[-1].outputs))["tensor"]
    stored = golden._index[id]
    with (golden.path / "tensors.bin").open("r+b") as file:
        file.seek(stored.offset + stored.bytes // 2)
        byte = file.read(1)[0]
        file.seek(stored.offset + stored.bytes // 2)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(PorterError, match=f"tensor {id} was changed"):
        golden.sketch(id)


def test_a_long_step_is_written_in_parts(qwen3: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = capture(qwen3(), [[1, 2, 3]], tmp_path / "whole")
    monkeypatch.setattr("porter.golden.module_hooks._MOST_PENDING", 7)
    parts = capture(qwen3(), [[1, 2, 3]], tmp_path / "parts")
    assert parts.records == whole.records
    assert (tmp_path / "parts" / "tensors.jsonl").read_bytes() == (tmp_path / "whole" / "tensors.jsonl").read_bytes()
