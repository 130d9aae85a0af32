"""DeepSeek's FP8 blocks as a source of ports: values, edges, both formats of output, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_checkpoint import block_dequantize, block_quantize, fp8_copy
from safetensors.torch import load_file, save_file

from porter.adaptation import adapt
from porter.checkpoint.reader import Checkpoint
from porter.errors import PorterError
from porter.fp8_blocks import BlockWeight, Fp8Blocks, block_size
from porter.models.presets import resolve
from porter.original import original_model
from porter.quantization import quantize_per_channel
from porter.recipe import TensorRecipe

FIELDS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def test_every_code_is_widened_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes[torch.isfinite(codes.float())].reshape(1, -1)
    weight = BlockWeight(finite, torch.ones(1, 2), (128, 128))
    assert torch.equal(weight.rows(0, 1), finite.to(torch.float32))
    broken = BlockWeight(codes.reshape(2, 128), torch.ones(1, 1), (128, 128))
    assert torch.equal(broken.rows(0, 2).isnan(), codes.reshape(2, 128).float().isnan())


@pytest.mark.parametrize("shape", [(1, 1), (127, 1), (128, 128), (129, 257), (37, 300), (300, 37)])
@pytest.mark.parametrize("block", [(128, 128), (16, 16), (3, 7), (1, 128)])
def test_blocks_are_multiplied_by_their_own_scale(shape: tuple[int, int], block: tuple[int, int]) -> None:
    codes, scale = block_quantize(torch.randn(shape, generator=torch.Generator().manual_seed(1)), block)
    weight, exact = BlockWeight(codes, scale, block), block_dequantize(codes, scale, block)
    assert torch.equal(weight.dense(torch.float32), exact.float())
    assert torch.equal(weight.dense(torch.bfloat16), exact.float().bfloat16())
    first, last = shape[0] // 3, shape[0] - shape[0] // 5
    assert torch.equal(weight.rows(first, last), exact[first:last].float())


def test_scales_may_be_powers_of_two_in_eight_bits() -> None:
    codes, _ = block_quantize(torch.randn(40, 40), (16, 16))
    scale = torch.randint(100, 140, (3, 3), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    exact = block_dequantize(codes, scale.float(), (16, 16))
    assert torch.equal(BlockWeight(codes, scale, (16, 16)).dense(torch.float32), exact.float())


@pytest.mark.parametrize("block", [(16, 16), (128, 128), (7, 5)])
def test_export_has_the_source_s_values(tmp_path: Path, block: tuple[int, int]) -> None:
    source = resolve("tiny-deepseek-v3").directory
    assert source is not None
    exact = fp8_copy(source, tmp_path / "fp8", block, split=True)
    port = adapt(tmp_path / "fp8", "cpu", scheme="bf16", output=tmp_path / "port")
    stored = load_file(tmp_path / "port" / "model.safetensors")
    for name in ("model.layers.0.self_attn.o_proj.weight", "model.layers.2.self_attn.kv_b_proj.weight"):
        assert torch.equal(stored[name], exact[name].float().bfloat16())
    original = port.correspondence.invert(dict(stored))
    layout = port.family.checkpoint_layout(port.reference.config)
    experts = original["model.layers.1.mlp.experts.down_proj"]
    entry = next(e for e in layout.entries if e.target == "model.layers.1.mlp.experts.down_proj")
    assert torch.equal(experts, entry.join([exact[s].float().bfloat16() for s in entry.sources]))
    assert "quantization_config" not in json.loads((tmp_path / "port" / "config.json").read_text())


def test_int8_export_requantizes_what_fp8_means_not_its_bf16_rounding(tmp_path: Path) -> None:
    source = resolve("tiny-deepseek-v3").directory
    assert source is not None
    exact = fp8_copy(source, tmp_path / "fp8", (16, 16))
    adapt(tmp_path / "fp8", "cpu", scheme="w8a8", output=tmp_path / "port")
    stored = load_file(tmp_path / "port" / "model.safetensors")
    for name, sources in {
        "model.layers.0.self_attn.o_proj.weight": ["model.layers.0.self_attn.o_proj.weight"],
        "model.layers.0.mlp.gate_up_proj.weight": [f"model.layers.0.mlp.{p}_proj.weight" for p in ("gate", "up")],
    }.items():
        codes, scale = quantize_per_channel(torch.cat([exact[s] for s in sources]).float())
        assert torch.equal(stored[name], codes)
        assert torch.equal(stored[f"{name}_scale"], scale)


def test_the_original_of_an_fp8_checkpoint_is_loaded_as_floats(tmp_path: Path) -> None:
    source = resolve("tiny-deepseek-v3").directory
    assert source is not None
    exact = fp8_copy(source, tmp_path / "fp8", (16, 16), split=True)
    state = original_model(tmp_path / "fp8").state_dict()
    name = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(state[name], exact[name].float().bfloat16())
    expert = exact["model.layers.1.mlp.experts.3.down_proj.weight"].float().bfloat16()
    assert torch.equal(state["model.layers.1.mlp.experts.down_proj"][3], expert)


def test_a_quantized_weight_is_never_wide_as_a_whole() -> None:
    seen: list[int] = []
    shape = (64, 8)

    def compute(parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        seen.append(parts[0].shape[0])
        codes, scale = quantize_per_channel(parts[0])
        return {"w": codes, "w_scale": scale}

    outputs = {"w": (torch.int8, shape), "w_scale": (torch.float32, shape[:1])}
    blocks = Fp8Blocks((16, 16), {"w": "w_scale_inv"})
    recipe = blocks.reading(TensorRecipe(outputs, ("w",), compute, by_rows=True))
    codes, scale = block_quantize(torch.randn(shape), (16, 16))
    result = recipe.compute([codes, scale])
    assert seen == [16, 16, 16, 16]
    assert recipe.sources == ("w", "w_scale_inv")
    wanted = quantize_per_channel(block_dequantize(codes, scale, (16, 16)).float())
    assert torch.equal(result["w"], wanted[0])
    assert torch.equal(result["w_scale"], wanted[1])


def test_pieces_of_which_some_are_fp8_are_read_at_once() -> None:
    codes, scale = block_quantize(torch.randn(4, 4), (2, 2))
    plain = torch.randn(4, 4).bfloat16()
    blocks = Fp8Blocks((2, 2), {"a": "a_scale_inv"})
    outputs = {"w": (torch.bfloat16, (8, 4))}
    recipe = blocks.reading(TensorRecipe(outputs, ("a", "b"), lambda parts: {"w": torch.cat(parts)}, pieces=2))
    assert (recipe.sources, recipe.pieces) == (("a", "a_scale_inv", "b"), 1)
    joined = torch.cat([block_dequantize(codes, scale, (2, 2)).float().bfloat16(), plain])
    assert torch.equal(recipe.compute([codes, scale, plain])["w"], joined)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method gptq without weight_block_size is not read"),
        ({"quant_method": "fp8"}, "without weight_block_size is not read"),
        ({**FIELDS, "fmt": "e5m2"}, "is not read"),
        ({**FIELDS, "weight_block_size": [128]}, "expected \\[rows, columns\\]"),
        ({**FIELDS, "weight_block_size": [0, 128]}, "expected \\[rows, columns\\]"),
        ({**FIELDS, "weight_block_size": [True, 128]}, "expected \\[rows, columns\\]"),
    ],
)
def test_other_quantizations_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(PorterError, match=words):
        block_size({"quantization_config": fields})
    assert block_size({}) is None
    assert block_size({"quantization_config": FIELDS}) == (128, 128)


Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("a.weight_scale_inv"), "1 FP8 weights have no _scale_inv"),
        (lambda t: t.update({"b.weight_scale_inv": torch.ones(1, 1)}), "1 scales belong to no FP8 weight"),
        (lambda t: t.update({"a.weight_scale_inv": torch.ones(2, 3)}), r"has \[3, 2\]"),
        (lambda t: t.update({"a.weight_scale_inv": torch.ones(3, 2, dtype=torch.int32)}), "is I32; expected one of"),
        (lambda t: t.update({"a.weight": torch.zeros(4, 4, 4).to(torch.float8_e4m3fn)}), "FP8 blocks are read of"),
    ],
)
def test_scales_that_do_not_fit_are_named(tmp_path: Path, edit: Callable[[Tensors], object], words: str) -> None:
    codes, scale = block_quantize(torch.randn(40, 20), (16, 16))
    tensors = {"a.weight": codes, "a.weight_scale_inv": scale}
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(PorterError, match=words):
        Fp8Blocks.of(Checkpoint.open(tmp_path), (16, 16))


def test_a_checkpoint_that_lacks_a_scale_is_refused_before_any_work(tmp_path: Path) -> None:
    source = resolve("tiny-deepseek-v3").directory
    assert source is not None
    fp8_copy(source, tmp_path / "fp8", (128, 128))
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    with pytest.raises(PorterError, match=r"experts\.3\.up_proj\.weight"):
        adapt(tmp_path / "fp8", "cpu", scheme="bf16", output=tmp_path / "port")
    assert not (tmp_path / "port").exists()
