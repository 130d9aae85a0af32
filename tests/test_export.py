"""The exported directory: complete, atomic, readable, and running where porter is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import porter
from porter.errors import PorterError, Refusal
from porter.models.family import FAMILY_FILES
from porter.models.proof import relative_error
from porter.original import original_model

Make = Callable[..., Path]

RUN = """
import json, sys, torch
import transformers
assert "porter" not in sys.modules
try:
    import porter
    raise SystemExit("porter is importable here")
except ModuleNotFoundError:
    pass
auto = getattr(transformers, json.load(open(sys.argv[1] + "/config.json"))["auto_map"].popitem()[0])
model = auto.from_pretrained(sys.argv[1], trust_remote_code=True, dtype="auto").eval()
ids = torch.tensor([[5, 7, 11, 13, 17]])
with torch.no_grad():
    logits = model(ids).logits[0, -1].double().tolist()
tokens = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0].tolist()
calls = [c for m in model.modules() for c in vars(m).values() if type(c).__name__ == "OpCall"]
providers = sorted({provider for call in calls for provider in call.calls})
dtypes = sorted({str(parameter.dtype) for parameter in model.parameters()})
print(json.dumps({"logits": logits, "tokens": tokens, "providers": providers, "dtypes": dtypes}))
"""


def run_without_porter(directory: Path, site: Path, home: Path, **environment: str) -> dict[str, object]:
    variables = {"PYTHONPATH": str(site), "HOME": str(home), "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1"}
    variables |= {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-S", "-c", RUN, str(directory)]
    done = subprocess.run(command, env=variables, cwd=home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("model_type", FAMILY_FILES)
def test_runs_without_porter(model_type: str, random_checkpoint: Make, bare_site: Path, tmp_path: Path) -> None:
    original = random_checkpoint(model_type)
    port = porter.adapt(str(original), "cpu", scheme="fp32", output=tmp_path / "port")
    assert port.directory is not None
    plain = original_model(original)
    ids = torch.tensor([[5, 7, 11, 13, 17]])
    with torch.no_grad():
        expected = plain(ids).logits[0, -1].double()
    seen = run_without_porter(port.directory, bare_site, tmp_path)
    assert relative_error(torch.tensor(seen["logits"], dtype=torch.float64), expected) < 1e-5
    tokens = plain.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0].tolist()
    assert seen["tokens"] == tokens


def test_runs_without_porter_and_without_a_compiler(random_checkpoint: Make, bare_site: Path, tmp_path: Path) -> None:
    port = porter.adapt(str(random_checkpoint("qwen3")), "cpu", scheme="fp32", output=tmp_path / "port")
    assert port.directory is not None
    empty = tmp_path / "empty"
    empty.mkdir()
    seen = run_without_porter(port.directory, bare_site, tmp_path, PATH=str(empty))
    assert seen["providers"] == ["reference"]


def test_what_the_directory_holds(random_checkpoint: Make, tmp_path: Path) -> None:
    source = random_checkpoint("deepseek_v3")
    (source / "preprocessor_config.json").write_text('{"do_resize": true}')
    port = porter.adapt(str(source), "cpu", output=tmp_path / "port")
    assert port.directory is not None
    assert (port.directory / "preprocessor_config.json").read_text() == '{"do_resize": true}'
    names = {p.name for p in port.directory.iterdir()}
    wanted = {"config.json", "port.json", "alignment.json", "upstream.diff", "README.md", "model.safetensors"}
    assert wanted | {"modeling_deepseek_v3_cpu.py"} <= names
    assert not [p.name for p in tmp_path.iterdir() if "partial" in p.name]
    manifest = json.loads((port.directory / "port.json").read_text())
    assert manifest["schema"] == "porter.port/1" and manifest["source"]["sha256"]
    assert {op["op"] for op in manifest["ops"]} >= {"rms_norm", "mla_attention", "experts", "router"}
    text = (port.directory / "modeling_deepseek_v3_cpu.py").read_text()
    assert "from porter" not in text and "import porter" not in text
    diff = (port.directory / "upstream.diff").read_text()
    assert "-        self.gate_proj = nn.Linear" in diff and "+        self.gate_up_proj = Linear" in diff


@pytest.mark.parametrize("scheme", ["w8a8", "w8a16"])
@pytest.mark.parametrize("model_type", ["qwen2", "deepseek_v3"])
def test_int8_reads_int8(scheme: str, model_type: str, random_checkpoint: Make, tmp_path: Path) -> None:
    original = random_checkpoint(model_type)
    port = porter.adapt(str(original), "cpu", scheme=scheme, dtype="fp32", output=tmp_path / "port")
    model = porter.load(tmp_path / "port")
    kinds = {n: p.dtype for n, p in model.named_parameters()}
    assert kinds["model.layers.1.self_attn.o_proj.weight"] == torch.int8
    assert kinds["model.layers.1.self_attn.o_proj.weight_scale"] == torch.float32
    assert kinds["lm_head.weight"] == torch.int8
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(original).eval()
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        error = relative_error(model(ids).logits, plain(ids).logits)
    # 8-bit rounding of each weight (and activation) row costs about 1/250 relative; a few layers add up.
    assert 1e-4 < error < 0.1
    assert port.plan.weight_bytes < 0.5 * 4 * port.plan.parameters


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe"])
def test_bf16_weights_stay_so_without_porter(
    model_type: str, random_checkpoint: Make, bare_site: Path, tmp_path: Path
) -> None:
    original = str(random_checkpoint(model_type))
    port = porter.adapt(original, "cpu", scheme="bf16", dtype="fp32", output=tmp_path / "port")
    with torch.no_grad():
        expected = porter.load(tmp_path / "port")(torch.tensor([[5, 7, 11, 13, 17]])).logits[0, -1]
    assert port.directory is not None
    result = run_without_porter(port.directory, bare_site, tmp_path)
    assert result["logits"] == expected.double().tolist()
    assert result["dtypes"] == ["torch.bfloat16", "torch.float32"]


def test_tied_embeddings_are_stored_once(random_checkpoint: Make, tmp_path: Path) -> None:
    from safetensors import safe_open

    original = random_checkpoint("qwen3", tie_word_embeddings=True)
    porter.adapt(str(original), "cpu", scheme="fp32", output=tmp_path / "port")
    with safe_open(tmp_path / "port" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()
    model = porter.load(tmp_path / "port")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_edited_code_needs_consent(random_checkpoint: Make, tmp_path: Path) -> None:
    porter.adapt(str(random_checkpoint("qwen3")), "cpu", scheme="fp32", output=tmp_path / "port")
    path = tmp_path / "port" / "modeling_qwen3_cpu.py"
    path.write_text(path.read_text() + "\nraise SystemExit('ran')\n")
    with pytest.raises(PorterError, match=r"differs from what this porter writes.*--trust-remote-code"):
        porter.load(tmp_path / "port")


def test_nothing_is_overwritten(random_checkpoint: Make, tmp_path: Path) -> None:
    (tmp_path / "port").mkdir()
    (tmp_path / "port" / "notes.txt").write_text("mine")
    with pytest.raises(PorterError, match="already exists and is not empty"):
        porter.adapt(str(random_checkpoint("qwen3")), "cpu", output=tmp_path / "port")
    assert [p.name for p in (tmp_path / "port").iterdir()] == ["notes.txt"]


def test_quantized_weights_without_their_scales_are_refused(random_checkpoint: Make, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    original = random_checkpoint("qwen3")
    tensors = load_file(original / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    for dtype in (torch.int32, torch.float8_e4m3fn):
        save_file(tensors | {name: tensors[name].to(dtype)}, original / "model.safetensors", {"format": "pt"})
        with pytest.raises(PorterError, match=rf"tensor {name} is .*quantized weights are not read"):
            porter.adapt(original, "cpu", output=tmp_path / "port")
    assert not (tmp_path / "port").exists()


def test_a_preset_ports_code_and_recipe(tmp_path: Path) -> None:
    port = porter.adapt("qwen3-0.6b", "cpu", output=tmp_path / "port")
    assert port.directory is not None and not list(port.directory.glob("*.safetensors"))
    recipe = json.loads((port.directory / "conversion.json").read_text())
    fused = next(r for r in recipe if "model.layers.0.self_attn.qkv_proj.weight" in r["outputs"])
    assert fused["sources"] == [f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkv"]


REFUSED = [
    ({"target": "cpu", "reference_only": ("rms",)}, r"--reference-only rms: is no Op"),
    ({"target": "nvidia", "plan": True}, r"--target nvidia: porter has no op provider for nvidia-"),
    ({"target": "cpu", "scheme": "fp8", "plan": True}, r"fp8"),
    ({"target": "cpu", "scheme": "fp32", "dtype": "bf16", "plan": True}, r"--dtype bf16 contradicts --scheme fp32"),
    ({"target": "cpu"}, r"--output is missing"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PorterError, match=message) as raised:
        porter.adapt("qwen3-0.6b", **arguments)
    assert not isinstance(raised.value, Refusal) and "\n" not in str(raised.value)


def test_evidence_is_that_of_the_chip_planned_for() -> None:
    """The kernels were measured on x86: a plan for another chip must not show that rung."""
    plan = porter.adapt("qwen3-0.6b", "cpu-arm64", plan=True).plan
    assert {op.provider for op in plan.ops} == {"reference"}
