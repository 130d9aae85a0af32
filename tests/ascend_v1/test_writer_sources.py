"""AscendV1 from every kind of source: FP8 blocks, other dtypes, biases, stacks of experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fp8_checkpoint import fp8_copy
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Qwen2Config
from written import WEIGHTS, entries, linears, nibbles, write

from porter.ascend_v1.check.checker import check_directory
from porter.models.presets import resolve


@pytest.mark.parametrize("block", [(16, 16), (128, 128), (7, 5)])
def test_fp8_blocks_are_requantized_from_what_they_mean(tmp_path: Path, block: tuple[int, int]) -> None:
    source = resolve("tiny-deepseek-v3").directory
    assert source is not None
    exact = fp8_copy(source, tmp_path / "fp8", block, split=True)
    path = write(tmp_path / "fp8", tmp_path / "v1", "w4a8")
    stored = load_file(path / WEIGHTS)
    for name in linears(path, "W8A8_DYNAMIC"):
        codes, scale = stored[f"{name}.weight"].double(), stored[f"{name}.weight_scale"].double()
        assert float(((codes * scale - exact[f"{name}.weight"]).abs() / scale).max()) <= 0.5 + 1e-5
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    assert torch.equal(stored[name], exact[name].float().bfloat16())
    assert not [n for n in stored if n.endswith("_scale_inv")]
    assert "quantization_config" not in json.loads((path / "config.json").read_text())
    assert check_directory(path).findings == ()


def qwen2(path: Path, dtype: torch.dtype) -> Path:
    """A random Qwen2, whose q, k and v have biases."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 40}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(**sizes, **heads, tie_word_embeddings=False, pad_token_id=0)  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_biases_and_deq_scales_by_the_dtype_of_the_model(tmp_path: Path, dtype: torch.dtype) -> None:
    model = qwen2(tmp_path / "qwen2", dtype)
    path = write(model, tmp_path / "v1", "w8a8_static")
    stored, source = load_file(path / WEIGHTS), load_file(model / "model.safetensors")
    narrow = torch.float16 if dtype == torch.float16 else torch.bfloat16
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"):
        found = stored[f"{name}.deq_scale"]
        assert found.dtype == (torch.int64 if narrow == torch.float16 else torch.float32)
        deq = found.to(torch.int32).view(torch.float32).double() if found.dtype == torch.int64 else found.double()
        codes, offset = stored[f"{name}.weight"].double(), float(stored[f"{name}.input_offset"])
        wanted = source[f"{name}.bias"].double() / deq - codes.sum(dim=1) * offset
        assert torch.equal(stored[f"{name}.quant_bias"].double(), wanted.round())
        assert torch.equal(stored[f"{name}.bias"], source[f"{name}.bias"].float())
        assert entries(path)[f"{name}.bias"] == "FLOAT"
    assert stored["model.norm.weight"].dtype == narrow
    assert json.loads((path / "config.json").read_text())["dtype"] == str(narrow).removeprefix("torch.")
    assert check_directory(path).findings == ()


def test_scales_of_a_float16_model_are_values_of_float16(tmp_path: Path) -> None:
    path = write(qwen2(tmp_path / "qwen2", torch.float16), tmp_path / "v1", "w8a8")
    scales = [t for n, t in load_file(path / WEIGHTS).items() if n.endswith("weight_scale")]
    assert scales
    assert all(torch.equal(t, t.half().float()) for t in scales)


@pytest.mark.parametrize("saved_as", ["released", "stacked"])
def test_stacked_experts_are_written_one_by_one(tmp_path: Path, saved_as: str) -> None:
    config = AutoConfig.for_model("qwen3_vl_moe")
    text = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"num_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    for key, value in (text | {"head_dim": 16, "vocab_size": 40, "pad_token_id": 0}).items():
        setattr(config.text_config, key, value)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    for key, value in (vision | {"deepstack_visual_indexes": [0]}).items():
        setattr(config.vision_config, key, value)
    for number, token in enumerate(("image", "video", "vision_start", "vision_end"), start=1):
        setattr(config, f"{token}_token_id", number)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    if saved_as == "released":
        file = tmp_path / "model" / "model.safetensors"
        tensors = load_file(file)
        save_file({n: (t.mT if ".experts." in n else t).contiguous() for n, t in tensors.items()}, file)
    path = write(tmp_path / "model", tmp_path / "v1", "w4a8")
    stored, experts = load_file(path / WEIGHTS), model.requires_grad_(False).model.language_model.layers[1].mlp.experts
    at = "model.language_model.layers.1.mlp.experts"
    halves = {"gate_proj": experts.gate_up_proj[2, :48], "up_proj": experts.gate_up_proj[2, 48:]}
    for part, weight in (halves | {"down_proj": experts.down_proj[2]}).items():
        codes, scale = nibbles(stored[f"{at}.2.{part}.weight"]), stored[f"{at}.2.{part}.weight_scale"]
        error = (codes.double() * scale.double() - weight.double()).norm() / weight.double().norm()
        assert float(error) < 0.12
    assert not [n for n in stored if "gate_up_proj" in n]
    assert entries(path)["model.visual.blocks.0.attn.qkv.weight"] == "FLOAT"
    assert check_directory(path).faults == ()
