"""Trained models ported to Ascend: the exported code runs under the emulator, speaks as the golden, and is aligned."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import porter
from porter.emulation import emulating
from porter.errors import PorterError
from porter.kernels.ascend.catalogue.vendor_op import FRACTAL_NZ
from porter.kernels.ascend.emulator.stand_in import emulated_npu
from porter.kernels.dispatch import usage
from porter.original import original_directory, original_model
from porter.runtime import read_manifest

CHIP = "ascend-910b"
PROMPT = "Once upon a time"
NEW_TOKENS = 16
MODELS = ("tiny-qwen2", "tiny-qwen3", "tiny-qwen3-moe", "tiny-deepseek-v2", "tiny-deepseek-v3")


@pytest.fixture(scope="module", params=MODELS)
def ported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, porter.Golden]:
    """A shipped model's port, and the golden of the original in bfloat16."""
    folder = tmp_path_factory.mktemp(request.param)
    porter.adapt(request.param, "ascend", output=folder / "port", strict=True)
    return folder / "port", golden_of(request.param, folder / "golden")


def golden_of(name: str, path: Path) -> porter.Golden:
    """The shipped model `name`, recorded in bfloat16."""
    original = original_directory(name)
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16).eval()
    ids = AutoTokenizer.from_pretrained(original)(PROMPT, return_tensors="pt").input_ids
    return porter.capture(model, ids, path, new_tokens=NEW_TOKENS)


def continued(model: Any, golden: porter.Golden) -> list[int]:
    """The tokens that `model` adds to the golden's prompt, greedily."""
    prompt = torch.tensor([golden.manifest["tokens"][0]])
    with torch.no_grad():
        return list(model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)[0, prompt.shape[1] :].tolist())


def test_the_exported_code_speaks_as_the_golden(ported: tuple[Path, porter.Golden]) -> None:
    directory, golden = ported
    with emulated_npu(CHIP) as emulator:
        seen: list[str] = []
        emulator.observers.append(lambda call, result: seen.append(call.op.name))
        model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype="auto").eval()
        assert type(model).__module__.startswith("transformers_modules.")
        assert continued(model, golden) == [int(step[0]) for step in golden.generated][:NEW_TOKENS]
        rows = usage(model)
    assert {row["provider"] for row in rows if row["calls"]} == {"ascend"}
    assert not [row for row in rows if row["fallbacks"]]
    assert {"npu_rms_norm", "npu_add_rms_norm", "npu_fused_infer_attention_score"} & set(seen)


def test_the_port_is_aligned_and_says_that_it_was_emulated(ported: tuple[Path, porter.Golden]) -> None:
    directory, golden = ported
    with emulating(CHIP):
        report = porter.align(golden, directory).to_json()
    assert report["verdict"] == "aligned", report["first_drift"]
    assert report["coverage"]["parameters"] == 1.0
    assert report["environment"]["candidate"]["emulated"] == CHIP


def test_without_the_chip_it_is_refused_in_words(ported: tuple[Path, porter.Golden]) -> None:
    with pytest.raises(PorterError, match=r"no torch_npu; run it there, or pass --emulate \(in Python: with porter"):
        porter.load(ported[0])
    with pytest.raises(PorterError, match="no-such-chip"), emulating("no-such-chip"):
        pass


def test_no_file_of_the_export_imports_porter(ported: tuple[Path, porter.Golden]) -> None:
    texts = {path.name: path.read_text() for path in ported[0].glob("*.py")}
    assert not [name for name, text in texts.items() if "from porter" in text or "import porter" in text]
    assert not [name for name in texts if "emulator" in name or "kernels_cpu" in name]
    assert "torch_npu" not in sys.modules


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-deepseek-v3"])
def test_int8_costs_what_it_must(name: str, tmp_path: Path) -> None:
    """Budgets of an int8 port are the rounding and what its codes cost: over them it would drift."""
    porter.adapt(name, "ascend", scheme="w8a8", output=tmp_path / "port", strict=True)
    golden = golden_of(name, tmp_path / "golden")
    with emulated_npu(CHIP) as emulator:
        seen: set[str] = set()
        emulator.observers.append(lambda call, result: seen.add(call.op.name))
        report = porter.align(golden, tmp_path / "port").to_json()
    assert report["verdict"] == "aligned", report["first_drift"]
    assert report["tokens"]["top1_agreement"] >= 0.9
    assert {"npu_dynamic_quant", "npu_quant_matmul", "npu_weight_quant_batchmatmul"} <= seen


def test_quantized_weights_are_cast_to_blocks_once_loaded(tmp_path: Path) -> None:
    porter.adapt("tiny-qwen3", "ascend", scheme="w8a8", output=tmp_path / "port")
    blocked = read_manifest(tmp_path / "port")["formats"]["FRACTAL_NZ"]
    assert "model.layers.0.mlp.gate_up_proj.weight" in blocked
    assert not [name for name in blocked if "norm" in name or "embed" in name]
    with emulated_npu(CHIP) as emulator:
        model = porter.load(tmp_path / "port", strict=True)
        parameters = dict(model.named_parameters())
        formats = {name: emulator.formats.of(parameter) for name, parameter in parameters.items()}
        assert {name for name, found in formats.items() if found == FRACTAL_NZ} == set(blocked)
        with torch.no_grad():
            laid_out = model(torch.arange(1, 9)[None]).logits
    with emulated_npu(CHIP):
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "port", trust_remote_code=True, dtype="auto").eval()
        with torch.no_grad():
            assert torch.equal(plain(torch.arange(1, 9)[None]).logits, laid_out)


def test_a_port_is_no_original(ported: tuple[Path, porter.Golden]) -> None:
    with pytest.raises(PorterError, match="is a port, whose tensors have other names; name its original checkpoint"):
        original_model(ported[0])
