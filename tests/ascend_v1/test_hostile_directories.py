"""`--check` of directories that nobody would write on purpose: a finding, and never a traceback or a clean bill."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from planted_traps import ATTENTION
from torch import Tensor
from written import WEIGHTS, Damaged, write

from porter.ascend_v1.check.checker import check_directory
from porter.cli.app import run
from porter.errors import PorterError
from porter.fp8_blocks import Fp8Blocks
from porter.models.presets import SHIPPED

EXPERT = "model.layers.1.mlp.experts.0.gate_proj"
ROUTER_BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"

CHANGES: dict[str, tuple[str, str, Callable[[Tensor], Tensor], str]] = {
    "offset NaN": ("w8a8_static", f"{ATTENTION}.o_proj.input_offset", lambda t: t * torch.nan, "input-offset"),
    "offset infinite": ("w8a8_static", f"{ATTENTION}.o_proj.input_offset", lambda t: t + torch.inf, "input-offset"),
    "packed scalar": ("w4a8", f"{EXPERT}.weight", lambda t: t.reshape(-1)[0], "shape"),
    "norm too short": ("w8a8", "model.norm.weight", lambda t: t[:-1], "shape"),
    "embedding of codes": ("w8a16", "model.embed_tokens.weight", lambda t: t.to(torch.int32), "dtype"),
    "router's bias too long": ("w8a8", ROUTER_BIAS, lambda t: torch.cat([t, t]), "shape"),
    "router's bias of integers": ("w8a8", ROUTER_BIAS, lambda t: t.to(torch.int64), "dtype"),
    "float linear transposed": ("w8a8", f"{ATTENTION}.kv_b_proj.weight", lambda t: t.t(), "shape"),
}
"""What is changed: scheme, tensor, change, the rule that finds it."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_tensor_that_cannot_be_loaded_is_a_fault(name: str, written: dict[str, Path], tmp_path: Path) -> None:
    scheme, tensor, change, rule = CHANGES[name]
    damaged = Damaged.copy_of(written[scheme], tmp_path / "d")
    damaged.tensors[tensor] = change(damaged.tensors[tensor]).clone()
    found = check_directory(damaged.save()).faults
    assert (rule, tensor) in [(f.rule, f.tensor) for f in found]


BIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "empty": lambda t: t[:0],
    "twice as long": lambda t: torch.cat([t, t]),
    "of fp8": lambda t: t.to(torch.float8_e4m3fn),
    "of integers": lambda t: t.to(torch.int8),
}


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_of_a_static_linear_that_fits_nothing(name: str, tmp_path: Path) -> None:
    damaged = Damaged.copy_of(write("tiny-qwen2", tmp_path / "q", "w8a8_static"), tmp_path / "d")
    bias = "model.layers.0.self_attn.k_proj.bias"
    damaged.tensors[bias] = BIASES[name](damaged.tensors[bias]).clone()
    assert bias in [f.tensor for f in check_directory(damaged.save()).faults]


@pytest.mark.parametrize("fields", [{"hidden_size": 0}, {"num_hidden_layers": "x"}, {"num_attention_heads": 7}])
def test_a_config_that_builds_nothing_is_a_fault(
    fields: dict[str, object], written: dict[str, Path], tmp_path: Path
) -> None:
    damaged = Damaged.copy_of(written["w8a16"], tmp_path / "d")
    damaged.config |= fields
    assert [f.rule for f in check_directory(damaged.save()).faults] == ["config"]


def test_an_index_of_other_files_hides_what_it_does_not_name(written: dict[str, Path], tmp_path: Path) -> None:
    path = Damaged.copy_of(written["w8a16"], tmp_path / "d").save()
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}))
    (found,) = check_directory(path).faults
    assert (found.rule, found.file) == ("index", index.name)
    assert WEIGHTS in found.line()
    index.write_text(json.dumps({"weight_map": dict.fromkeys(("a", "b"), WEIGHTS)}))
    assert check_directory(path).findings == ()
    index.write_text("{}")
    assert [f.rule for f in check_directory(path).faults] == ["index"]


def test_types_of_any_text_stay_on_one_short_line(
    written: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = Damaged.copy_of(written["w8a16"], tmp_path / "d")
    damaged.retype(f"{ATTENTION}.o_proj.weight", "FLOAT\n\x1b[31m" + "x" * 5000)
    assert run(["adapt", "--check", str(damaged.save())]) == 1
    out = capsys.readouterr().out
    assert "\x1b[31m" not in out
    assert max(map(len, out.splitlines())) < 1000


ASCEND = ("adapt", "tiny-qwen3", "--target", "ascend", "--format", "ascend-v1", "--plan")
UNUSED = {
    (*ASCEND, "--strict"): "--format ascend-v1: has no use for --strict; leave it out",
    (*ASCEND, "--tp", "4", "--ep", "0"): "has no use for --tp, --ep; leave them out",
    (*ASCEND, "--reference-only", "linear"): "has no use for --reference-only",
    (*ASCEND, "--context", "0"): "has no use for --context",
    (*ASCEND, "--calibration", "nowhere.txt"): "--calibration: scheme w8a8 measures activations as it runs",
    ("adapt", "--check", "D", "--target", "ascend"): "--check: has no use for --target",
    ("adapt", "tiny-qwen3", "--check", "D", "--plan"): "--check: has no use for MODEL, --plan",
    ("adapt", "--check", "D", "--tp", "2"): "--check: has no use for --tp",
    ("adapt", "tiny-qwen3", "--target", "cpu", "--plan", "--context", "0"): "only plans for Ascend have them",
}


@pytest.mark.parametrize("words", UNUSED)
def test_options_without_a_use_are_refused(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(list(words)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("porter: ")]
    assert UNUSED[words] in line


@pytest.mark.parametrize("value", [[], 3, "fp8"])
def test_a_quantization_config_that_is_no_object_is_named(
    value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = json.loads((SHIPPED / "tiny-qwen3/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": value}))
    assert run(["adapt", str(tmp_path), "--target", "ascend", "--plan"]) == 2
    assert "config.json: quantization_config is " in capsys.readouterr().err


def test_a_porter_section_that_is_no_object_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = json.loads((SHIPPED / "tiny-qwen3/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"porter": "x"}))
    assert run(["adapt", str(tmp_path), "--target", "ascend", "--plan"]) == 2
    assert "config.json: porter is 'x'; must be an object" in capsys.readouterr().err


BLOCK = Fp8Blocks((2, 2), {"w": "w_scale_inv"})


@pytest.mark.parametrize(("scale", "wrong"), [(-1.0, 2), (0.0, 1)])
def test_fp8_scales_that_no_quantizer_writes_are_refused(scale: float, wrong: int) -> None:
    codes = torch.ones(4, 3).to(torch.float8_e4m3fn)
    codes[:, 2] = 0.0
    scales = torch.ones(2, 2)
    BLOCK.parts(["w"], [codes, scales])
    scales[1] = scale
    with pytest.raises(PorterError, match=f"{wrong} of 4 values of weight_scale_inv are negative, or 0 over codes"):
        BLOCK.parts(["w"], [codes, scales])
