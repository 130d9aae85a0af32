"""What could not be compared, or was made up, is never called aligned and never runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import porter
from porter.cli.app import run
from porter.errors import PorterError

Make = Callable[..., Path]


@pytest.fixture
def pair(random_checkpoint: Make, tmp_path: Path) -> tuple[Path, Path]:
    """A golden and the port of one random Qwen3."""
    from transformers import AutoModelForCausalLM

    original = random_checkpoint("qwen3")
    model = AutoModelForCausalLM.from_pretrained(original).eval()
    porter.capture(model, torch.arange(1, 9)[None], tmp_path / "golden", new_tokens=3)
    porter.adapt(original, "cpu", scheme="fp32", output=tmp_path / "port")
    return tmp_path / "golden", tmp_path / "port"


def test_a_candidate_that_raises_is_not_aligned(pair: tuple[Path, Path]) -> None:
    golden, port = pair
    model = porter.load(port)
    assert porter.align(golden, model).verdict == "aligned"

    def raises(*arguments: Any, **keywords: Any) -> None:
        raise ValueError("in forward")

    model.model.layers[1].mlp.forward = raises
    report = porter.align(golden, model)
    assert report.verdict != "aligned"
    assert any("in forward" in skipped.why for skipped in report.coverage.skipped)


def test_exit_in_a_candidate_file_is_a_failure(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def build():\n    raise SystemExit(0)\n")
    assert run(["align", str(pair[0]), f"{tmp_path / 'bad.py'}:build"]) == 2


def test_int8_is_judged_in_the_free_run(random_checkpoint: Make, pair: tuple[Path, Path], tmp_path: Path) -> None:
    """A cache that forgets shows in the free run alone; a quantized candidate must not escape it."""
    golden, _ = pair
    porter.adapt(tmp_path / "original", "cpu", scheme="int8", dtype="fp32", output=tmp_path / "int8")
    model = porter.load(tmp_path / "int8")
    assert porter.align(golden, model).verdict == "aligned"

    def forget(module: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        for layer in getattr(keywords.get("cache"), "layers", ()):
            if getattr(layer, "is_initialized", False):
                layer.values.zero_()

    model.model.register_forward_pre_hook(forget, with_kwargs=True)
    assert porter.align(golden, model).verdict == "drift"


def test_changed_and_shortened_goldens_are_refused(pair: tuple[Path, Path]) -> None:
    golden, port = pair
    records = golden / "records.jsonl"
    whole = records.read_text()
    records.write_text("".join(whole.splitlines(keepends=True)[:-20]))
    with pytest.raises(PorterError, match="record it again"):
        porter.align(golden, port)
    records.write_text(whole)
    content = bytearray((golden / "tensors.bin").read_bytes())
    content[len(content) // 2] ^= 0x40
    (golden / "tensors.bin").write_bytes(content)
    with pytest.raises(PorterError, match="was changed; record the golden again"):
        opened = porter.Golden.open(golden)
        for index in range(len(opened.records)):
            opened.value(opened.records[index].inputs)
            opened.value(opened.records[index].outputs)


def test_ports_with_missing_weights_do_not_run(pair: tuple[Path, Path]) -> None:
    file = pair[1] / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(PorterError, match=r"model\.safetensors: its bytes differ from port\.json's"):
        porter.load(pair[1])


def test_configs_that_cannot_be_built_are_named(random_checkpoint: Make, tmp_path: Path) -> None:
    original = random_checkpoint("qwen3")
    config = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps(config | {"hidden_act": "nope"}))
    with pytest.raises(PorterError, match=r"config\.json: hidden_act is .nope.; must be an activation"):
        porter.adapt(original, "cpu", output=tmp_path / "port")
    assert not (tmp_path / "port").exists()


def test_an_alignment_is_entered_into_the_certificate(pair: tuple[Path, Path]) -> None:
    golden, port = pair
    assert run(["align", str(golden), str(port)]) == 0
    certificate = json.loads((port / "alignment.json").read_text())
    assert certificate["alignment"]["verdict"] == "aligned" and certificate["alignment"]["golden"] == str(golden)
    assert certificate["proof"]["bound"] == 1e-9
    porter.load(port)


def test_a_golden_of_another_type_of_model_is_refused(random_checkpoint: Make, pair: tuple[Path, Path]) -> None:
    golden, port = pair
    other = port.with_name("other")
    porter.adapt(random_checkpoint("qwen2", "qwen2"), "cpu", scheme="fp32", output=other)
    with pytest.raises(PorterError, match=r"is a port of a qwen2 model, and .* was recorded of a qwen3 one"):
        porter.align(golden, other)
    assert json.loads((other / "alignment.json").read_text())["alignment"] is None
