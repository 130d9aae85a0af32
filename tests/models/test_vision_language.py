"""Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE: ported with their vision towers, proven, exported and aligned with images."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING

import porter
from porter.adaptation import stored_shapes
from porter.errors import PorterError
from porter.generation import generate
from porter.models.family import family_of
from porter.models.field_rules import check_fields
from porter.models.images import forget_positions, image_prompt
from porter.models.presets import read_config
from porter.models.proof import BOUND, prove_model
from porter.models.proof_parts import IMAGE_PARTS, PARTS
from porter.models.reduce import TOKEN_FIELDS, randomise, reduced_config
from porter.original import original_model

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")


def reduced(model_type: str) -> Any:
    family = family_of(model_type)
    config = reduced_config(CONFIG_MAPPING[model_type]())
    for name in TOKEN_FIELDS:
        setattr(config.get_text_config(), name, 0)
    upstream = getattr(importlib.import_module(family.module), family.class_name)
    return randomise(upstream(config)).eval()


def inputs(model: Any, padded: int = 0) -> dict[str, torch.Tensor]:
    prompt = image_prompt(model)
    mask = torch.ones_like(prompt.input_ids)
    mask[0, :padded] = 0
    return {"input_ids": prompt.input_ids, "attention_mask": mask, **prompt.keywords}


@pytest.fixture(scope="module", params=FAMILIES)
def ported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, porter.Port]:
    """The float32 original at reduced width, and the port of its checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    reduced(request.param).save_pretrained(folder / "original")
    port = porter.adapt(folder / "original", scheme="fp32", output=folder / "port", strict=True)
    return original_model(folder / "original"), port


def test_vision_and_text_are_ported_and_proven_with_images(ported: tuple[Any, porter.Port]) -> None:
    port = ported[1]
    rewrites = {c.candidate.rewrite for c in port.source.classes}
    assert {"vision_attention", "attention", "rms_norm", "decoder_layer"} <= rewrites
    assert port.source.proof.errors.keys() == {*PARTS, *IMAGE_PARTS}
    assert port.source.proof.passed and not port.source.proof.skipped
    assert all(c.error <= BOUND for c in port.source.classes)
    assert port.source.near_misses == {}


@pytest.mark.parametrize("padded", [0, 4])
def test_64_greedy_tokens_after_images_are_transformers(ported: tuple[Any, porter.Port], padded: int) -> None:
    original, port = ported
    model = porter.load(port.directory)
    for each in (original, model):
        each.generation_config.eos_token_id = None
    given = inputs(original, padded)
    options = {"max_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**given, **options), original.generate(**given, **options))


def test_text_after_images_is_not_shifted_by_them(ported: tuple[Any, porter.Port]) -> None:
    model = porter.load(ported[1].directory)
    ids = torch.arange(1, 9)[None]
    alone = [int(step.tokens[0]) for step in generate(model, ids, 12)]
    with torch.no_grad():
        model(**inputs(model))
    assert [int(step.tokens[0]) for step in generate(model, ids, 12)] == alone


@pytest.mark.parametrize("ported", ["qwen3_vl"], indirect=True)
def test_directory_loads_where_porter_is_not_installed(ported: tuple[Any, porter.Port]) -> None:
    original, port = ported
    code = (
        "import sys; sys.modules['porter'] = None\n"
        "import torch; from transformers import AutoModelForImageTextToText\n"
        "model = AutoModelForImageTextToText.from_pretrained(sys.argv[1], trust_remote_code=True, dtype='auto')\n"
        "given = torch.load(sys.argv[2])\n"
        "with torch.no_grad(): torch.save(model.eval()(**given).logits, sys.argv[3])\n"
    )
    assert port.directory is not None
    files = port.directory.parent / "given.pt", port.directory.parent / "logits.pt"
    torch.save(inputs(original), files[0])
    subprocess.run([sys.executable, "-c", code, str(port.directory), *map(str, files)], check=True, cwd=files[0].parent)
    forget_positions(original)
    with torch.no_grad():
        torch.testing.assert_close(torch.load(files[1]), original(**inputs(original)).logits, rtol=1e-4, atol=1e-4)
    mapping = json.loads((port.directory / "config.json").read_text())["auto_map"]
    assert list(mapping) == ["AutoModelForImageTextToText"]


def test_original_weights_come_back_bit_for_bit(ported: tuple[Any, porter.Port]) -> None:
    port = ported[1]
    state = porter.load(port.directory).state_dict()
    back = port.layout.invert(port.correspondence.invert(state))
    stored = load_file(port.reference.directory / "model.safetensors")  # type: ignore[operator]
    assert all(torch.equal(tensor, back[name]) for name, tensor in stored.items())


@pytest.mark.parametrize(("ported", "scheme"), [("qwen2_5_vl", "w8a16"), ("qwen3_vl_moe", "w8a8")], indirect=["ported"])
def test_linears_of_both_parts_are_quantized(ported: tuple[Any, porter.Port], scheme: str, tmp_path: Path) -> None:
    original, port = ported
    small = porter.adapt(port.reference.directory, scheme=scheme, output=tmp_path / "port")  # type: ignore[arg-type]
    names = small.config.porter["quantized"]
    assert any(".visual." in name for name in names) and any(".language_model." in name for name in names)
    with porter.recording(original, tmp_path / "golden"), torch.no_grad():
        original(**inputs(original), use_cache=False)
    assert porter.align(tmp_path / "golden", tmp_path / "port").verdict == "aligned"


# -- alignment


def rope_axes_swapped(model: Any) -> None:
    tower = model.model.visual.rotary_pos_emb
    compose = tower.recomposition_frequencies
    tower.recomposition_frequencies = lambda freq: compose(freq.flip(1))


def merger_order(model: Any) -> None:
    merger = model.model.visual.merger
    forward = merger.forward
    merger.forward = lambda x: forward(x.view(-1, 4, x.shape[-1])[:, [0, 2, 1, 3]].reshape(x.shape))


def images_see_each_other(model: Any) -> None:
    attention = model.model.visual.blocks[1].attn
    forward = attention.forward
    attention.forward = lambda hidden, cu_seqlens, **keywords: forward(
        hidden, cu_seqlens=cu_seqlens[[0, -1]], **keywords
    )


FAULTS: list[tuple[Callable[[Any], None] | None, str]] = [
    (None, ""),
    (rope_axes_swapped, "model.visual.rotary_pos_emb"),
    (merger_order, "model.visual.merger"),
    (images_see_each_other, "model.visual.blocks.1.attn"),
]


@pytest.fixture(scope="module")
def golden(ported: tuple[Any, porter.Port], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden") / "golden"
    original = ported[0]
    original.generation_config.eos_token_id = None
    with porter.recording(original, path):
        original.generate(**inputs(original, padded=4), max_new_tokens=4, do_sample=False, pad_token_id=0)
    return path


@pytest.mark.parametrize("ported", ["qwen3_vl"], indirect=True)
@pytest.mark.parametrize(("plant", "module"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_fault_in_the_vision_tower_is_found_by_name(
    ported: tuple[Any, porter.Port], golden: Path, plant: Callable[[Any], None] | None, module: str
) -> None:
    model = porter.load(ported[1].directory)
    if plant is not None:
        plant(model)
    report = porter.align(golden, model, correspondence=ported[1].correspondence)
    assert report.verdict == ("drift" if plant else "aligned")
    assert (report.first_drift.module if report.first_drift else "") == module


# -- what the proof must see


@pytest.mark.parametrize("plant", [fault for fault, _ in FAULTS if fault])
def test_a_wrong_vision_tower_does_not_pass_the_proof(plant: Callable[[Any], None]) -> None:
    source, wrong = reduced("qwen3_vl").double(), reduced("qwen3_vl").double()
    assert prove_model(source, wrong).passed
    plant(wrong)
    errors = prove_model(source, wrong).errors
    assert all(error > 1e-4 for name, error in errors.items() if name in IMAGE_PARTS)
    assert all(errors[name] <= BOUND for name in PARTS)


# -- checkpoints and configurations


def test_experts_stored_transposed_as_released(tmp_path: Path) -> None:
    model = reduced("qwen3_vl_moe")
    model.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "released")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    released = {n: t.transpose(1, 2).contiguous() if ".experts." in n else t for n, t in tensors.items()}
    save_file(released, tmp_path / "released" / "model.safetensors", metadata={"format": "pt"})
    states = []
    for name in ("plain", "released"):
        port = porter.adapt(tmp_path / name, scheme="fp32", output=tmp_path / f"port-{name}")
        states.append(porter.load(port.directory).state_dict())
        assert [e.kind for e in port.layout.entries] == (["transposed"] * 6 if name == "released" else [])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    family, config = family_of("qwen3_vl_moe"), model.config
    layout = family.checkpoint_layout(config, stored_shapes(tmp_path / "released"))
    assert all(torch.equal(tensor, layout.invert(tensors)[name]) for name, tensor in released.items())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vision_config": {"depth": 0}}, "vision_config: depth is 0; must be at least 1"),
        ({"vision_config": {"num_heads": 5}}, "vision_config.hidden_size is 32; must be a multiple of num_heads"),
        ({"vision_config": {"out_hidden_size": 7}}, "out_hidden_size is 7; must be text_config's hidden_size"),
        ({"vision_config": {"deepstack_visual_indexes": [9]}}, "deepstack_visual_indexes is [9]; must be blocks"),
        ({"text_config": {"num_hidden_layers": -1}}, "text_config: num_hidden_layers is -1"),
        ({"image_token_id": 61}, "image_token_id is 61; must be a token id below 61"),
    ],
)
def test_a_wrong_nested_field_is_named(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    fields = json.loads(reduced("qwen3_vl").config.to_json_string(use_diff=False))
    for name, value in change.items():
        fields[name] = {**fields[name], **value} if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(PorterError) as caught:
        read_config(tmp_path)
    assert said in str(caught.value)


def test_a_nested_config_must_be_an_object() -> None:
    with pytest.raises(PorterError, match=r"config\.json: vision_config is 3; must be an object"):
        check_fields({"model_type": "qwen3_vl", "vision_config": 3}, "config.json")


def test_the_tower_is_built_from_the_ported_file(ported: tuple[Any, porter.Port]) -> None:
    """An auto class would build transformers' own tower, and nothing of it would be ported."""
    model = porter.load(ported[1].directory)
    homes = {type(part).__module__ for part in model.modules() if isinstance(part, nn.Module)}
    assert not any("modeling_qwen" in home and home.startswith("transformers.models") for home in homes)
