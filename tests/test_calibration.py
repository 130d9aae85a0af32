"""Measuring the inputs of linears, and the schemes that need it: what a port then holds, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

import porter
from porter.activation_range import Range
from porter.calibration import Calibration, calibration_of, linear_sources, measure, model_told, read_calibration
from porter.chips.catalogue import load_catalogue
from porter.correspondence import Correspondence, Entry
from porter.emulation import emulating
from porter.errors import PorterError
from porter.kernels.reference.experts_w4a8 import unpack_int4, unpack_scale

Make = Callable[..., Path]
ROWS = [[1, 5, 9, 2, 7], [3, 3, 8]]
FUSED = Correspondence((Entry("block.qk", ("block.q", "block.k"), (2, 2)),))
LOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, dtype="auto").eval()
with torch.no_grad():
    logits = model(torch.tensor([[5, 7, 11, 13, 17]])).logits[0, -1].double()
dtypes = sorted({str(p.dtype) for p in model.parameters()})
print(json.dumps({"logits": logits.tolist(), "dtypes": dtypes}))
"""


def ids_file(tmp_path: Path) -> Path:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(ROWS))
    return file


def test_ranges_are_the_extremes_of_every_row_and_hold_zero(random_checkpoint: Make) -> None:
    model = AutoModelForCausalLM.from_pretrained(random_checkpoint("qwen2")).eval()
    names = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda m, a, n=name: seen[n].append(a[0])) for name in names
    ]
    with torch.no_grad():
        for row in ROWS:
            model(torch.tensor([row]))
    for handle in handles:
        handle.remove()
    found = measure(model, names, ROWS)
    for name in names:
        flat = torch.cat([t.flatten() for t in seen[name]])
        assert found[name] == Range(min(0.0, float(flat.min())), max(0.0, float(flat.max())))
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_fused_linear_takes_the_range_of_all_its_parts() -> None:
    calibration = Calibration({"block.q": Range(-1.0, 2.0), "block.k": Range(-3.0, 1.0)}, "data", "", 3)
    assert linear_sources(["block.qk", "head"], FUSED) == {"block.qk": ("block.q", "block.k"), "head": ("head",)}
    assert calibration.of_modules(["block.qk"], FUSED) == {"block.qk": Range(-3.0, 2.0)}
    with pytest.raises(PorterError, match="head was never called"):
        calibration.of_modules(["head"], FUSED)


def test_what_was_measured_is_read_back(tmp_path: Path) -> None:
    calibration = Calibration({"block.q": Range(-1.0, 2.0)}, "prompts.txt", "ab", 12)
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(calibration.to_json()))
    assert read_calibration(file) == calibration
    assert calibration_of(file, tmp_path, ["block.qk"], FUSED) == calibration, "no model is needed"
    content = json.loads(file.read_text())
    scale, offset = Range(-1.0, 2.0).parameters()
    assert content["linears"]["block.q"]["input_offset"] == int(offset)
    del content["linears"]["block.q"]["low"]
    file.write_text(json.dumps(content))
    again = read_calibration(file).linears["block.q"]
    assert again.low == pytest.approx(-1.0, abs=float(scale)) and again.high == pytest.approx(2.0, abs=float(scale))


@pytest.mark.parametrize(
    ("linears", "words"),
    [
        ([], "linears: expected an object"),
        ({"q": 3}, r"linears\['?q'?\]: expected numbers low and high"),
        ({"q": {"low": 1.0, "high": 2.0}}, "does not hold zero"),
        ({"q": {"low": -1.0, "high": 1e400}}, "not finite"),
        ({"q": {"low": -(10**400), "high": 0}}, "not finite"),
        ({"q": {"input_scale": 0, "input_offset": 0}}, "input_scale above 0"),
    ],
)
def test_a_calibration_that_cannot_be_used_is_refused(linears: object, words: str, tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({"linears": linears}).replace("Infinity", "1e400"))
    with pytest.raises(PorterError, match=words):
        read_calibration(file)


@pytest.mark.parametrize("name", ["/dev/zero", "."])
def test_calibration_data_is_a_file_that_ends(name: str, tmp_path: Path) -> None:
    with pytest.raises(PorterError, match=r"missing or not a regular file; prompts as text"):
        calibration_of(tmp_path / name, tmp_path, [], Correspondence(()))


def test_inputs_that_are_not_finite_are_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = type("Config", (), {"vocab_size": 10, "get_text_config": lambda self, **k: self})()
            self.linear = nn.Linear(1, 1)

        def forward(self, tokens: torch.Tensor, use_cache: bool) -> torch.Tensor:
            return self.linear(tokens.float()[..., None] / 0.0)  # type: ignore[no-any-return]

    with pytest.raises(PorterError, match="the input of linear is not finite"):
        measure(Model(), ["linear"], [[1, 2]])


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}
    return found


def emulated_logits(directory: Path, ids: list[int]) -> torch.Tensor:
    with emulating(load_catalogue().get("ascend")), torch.no_grad():
        logits: torch.Tensor = porter.load(directory)(torch.tensor([ids])).logits[0, -1]
    return logits.double()


def without_porter(directory: Path, site: Path, home: Path) -> dict[str, list[object]]:
    variables = {"PYTHONPATH": str(site), "HOME": str(home), "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1"}
    variables |= {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-S", "-c", LOAD, str(directory)]
    done = subprocess.run(command, env=variables, cwd=home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("scheme", ["deepseek-w8a8", "w4a8"])
def test_the_mixed_schemes_of_deepseek(scheme: str, random_checkpoint: Make, bare_site: Path, tmp_path: Path) -> None:
    original = random_checkpoint("deepseek_v3")
    calibration = ids_file(tmp_path) if scheme == "deepseek-w8a8" else None
    port = porter.adapt(original, "ascend", scheme=scheme, output=tmp_path / "port", calibration=calibration)
    assert port.directory is not None
    chosen = port.config.porter["quantized"]
    held, source = tensors_of(port.directory), tensors_of(original)
    attention, experts = "model.layers.1.self_attn.o_proj", "model.layers.1.mlp.experts"
    assert held["model.layers.1.self_attn.kv_b_proj.weight"].dtype == torch.bfloat16
    if scheme == "w4a8":
        assert chosen[attention] == "w8a8" and chosen[experts] == "w4a8" and chosen["lm_head"] == "w8a16"
        step = unpack_scale(held[f"{experts}.down_proj_scale"]).transpose(-1, -2)
        back = unpack_int4(held[f"{experts}.down_proj"]).double() * step.double()
        wanted = (
            torch.stack(
                [source[n] for n in sorted(source, key=_number) if ".layers.1.mlp.experts." in n and "down_proj" in n]
            )
            if f"{experts}.down_proj" not in source
            else source[f"{experts}.down_proj"]
        )
        assert bool(((back - wanted.double()).abs() <= step.double() * 0.5001).all())
    else:
        assert chosen[attention] == "w8a8_static" and chosen[experts] == "w8a8" and "lm_head" not in chosen
        offset, codes = held[f"{attention}.input_offset"], held[f"{attention}.weight"]
        sums = codes.to(torch.int64).sum(-1)
        assert held[f"{attention}.quant_bias"].tolist() == (-int(offset) * sums).tolist()
        manifest = json.loads((port.directory / "port.json").read_text())
        stored = manifest["calibration"]["linears"][attention]
        assert (
            stored["input_scale"] == float(held[f"{attention}.input_scale"]) and manifest["calibration"]["tokens"] == 8
        )
        assert json.loads((port.directory / "calibration.json").read_text()) == manifest["calibration"]
    seen = without_porter(port.directory, bare_site, tmp_path)
    here = emulated_logits(port.directory, [5, 7, 11, 13, 17])
    # The reference and the emulated operators round to bfloat16 in different places.
    assert float((torch.tensor(seen["logits"], dtype=torch.float64) - here).norm() / here.norm()) < 0.1
    assert ("torch.int64" in seen["dtypes"]) == (scheme == "w4a8") and "torch.int8" in seen["dtypes"]


def _number(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if part.isdigit()]


def test_static_scales_of_a_dense_model_and_calibration_used_again(random_checkpoint: Make, tmp_path: Path) -> None:
    original = random_checkpoint("qwen2")
    first = porter.adapt(
        original, "ascend", scheme="w8a8_static", output=tmp_path / "a", calibration=ids_file(tmp_path)
    )
    assert first.directory is not None
    held = tensors_of(first.directory)
    assert held["model.layers.0.self_attn.qkv_proj.input_scale"].shape == (1,)
    assert "model.layers.0.self_attn.qkv_proj.bias" in held, "the bias stays beside the correction"
    again = porter.adapt(
        original,
        "ascend",
        scheme="w8a8_static",
        output=tmp_path / "b",
        calibration=first.directory / "calibration.json",
    )
    assert again.directory is not None
    assert all(torch.equal(tensor, held[name]) for name, tensor in tensors_of(again.directory).items())
    plain = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = plain(torch.tensor(ROWS[:1])).logits[0, -1].double()
    error = float((emulated_logits(first.directory, ROWS[0]) - expected).norm() / expected.norm())
    assert 1e-3 < error < 0.2


@pytest.mark.parametrize(
    ("model_type", "target", "scheme", "words"),
    [
        ("qwen2", "cpu", "w8a8_static", "cpu.* has no kernel of linear/w8a8_static .*chips that have one: ascend-910b"),
        ("qwen2", "ascend", "deepseek-w8a8", "the model has no latent attention"),
        ("qwen2", "ascend", "w4a8", "the model has no routed experts"),
        ("qwen2", "ascend-950", "w8a8", "ascend-950 has no kernel of linear/w8a.* .*not documented for ascend-950"),
        ("qwen2", "ascend", "w8a8_static", "give --calibration FILE"),
    ],
)
def test_what_a_target_or_model_does_not_have(
    model_type: str, target: str, scheme: str, words: str, random_checkpoint: Make, tmp_path: Path
) -> None:
    with pytest.raises(PorterError, match=words):
        porter.adapt(random_checkpoint(model_type), target, scheme=scheme, output=tmp_path / "port")
    assert not (tmp_path / "port").exists()


def test_calibration_of_a_scheme_that_takes_none(random_checkpoint: Make, tmp_path: Path) -> None:
    with pytest.raises(PorterError, match="scheme w8a8 measures activations as it runs, or not; leave it out"):
        porter.adapt(random_checkpoint("qwen2"), "ascend", scheme="w8a8", output=tmp_path / "port", calibration="x.txt")


def test_a_calibration_of_another_model_is_refused(random_checkpoint: Make, tmp_path: Path) -> None:
    qwen2, qwen3 = random_checkpoint("qwen2", "qwen2"), random_checkpoint("qwen3", "qwen3")
    stored = tmp_path / "calibration.json"
    told = Calibration({"block.q": Range(-1.0, 2.0)}, "prompts.txt", "ab", 12, model_told(qwen2))
    stored.write_text(json.dumps(told.to_json()))
    assert calibration_of(stored, qwen2, [], Correspondence(())) == told
    with pytest.raises(PorterError, match=r"model: was measured on qwen2, .* not on qwen3"):
        calibration_of(stored, qwen3, [], Correspondence(()))
