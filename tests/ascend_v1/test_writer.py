"""What is written as AscendV1: every number against float64 formulas, every name, from every kind of source."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from written import DESCRIPTION, WEIGHTS, entries, linears, measured, nibbles, write

import porter.checkpoint.convert
from porter.activation_range import Range
from porter.ascend_v1.check.checker import check_directory
from porter.ascend_v1.writer import description_of, plan_ascend_v1, write_ascend_v1
from porter.errors import PorterError
from porter.models.presets import resolve

Tensors = dict[str, torch.Tensor]


def source_of(model: str) -> Tensors:
    directory = resolve(model).directory
    assert directory is not None
    return {name: tensor.double() for name, tensor in load_file(directory / "model.safetensors").items()}


def is_bf16(values: torch.Tensor) -> bool:
    return torch.equal(values, values.bfloat16().to(values.dtype))


def test_dynamic_linears_are_within_half_a_step_of_scales_that_bf16_holds(written: dict[str, Path]) -> None:
    stored, source = load_file(written["w8a8"] / WEIGHTS), source_of("tiny-deepseek-v3-mtp")
    names = linears(written["w8a8"], "W8A8_DYNAMIC")
    assert len(names) == 172
    for name in names:
        weight, codes, scale = (source[f"{name}.weight"], *(stored[f"{name}.{s}"] for s in ("weight", "weight_scale")))
        assert codes.dtype == torch.int8
        assert scale.shape == (weight.shape[0], 1)
        assert is_bf16(scale)
        assert float(((codes.double() * scale.double() - weight).abs() / scale.double()).max()) <= 0.5
        step = weight.abs().amax(dim=1, keepdim=True) / 127
        assert bool((scale.double() >= step).all())
        assert bool((scale.double() <= step * (1 + 2.0**-7)).all())
        assert not stored[f"{name}.weight_offset"].any()


def test_int4_experts_are_packed_by_rows_and_their_sums_are_stored(written: dict[str, Path]) -> None:
    stored, source = load_file(written["w4a8"] / WEIGHTS), source_of("tiny-deepseek-v3-mtp")
    names = linears(written["w4a8"], "W4A8_DYNAMIC")
    assert len(names) == 144
    for name in names:
        weight = source[f"{name}.weight"]
        codes, scale = nibbles(stored[f"{name}.weight"]).double(), stored[f"{name}.weight_scale"].double()
        assert stored[f"{name}.weight"].shape == (weight.shape[0] // 2, weight.shape[1])
        sums = 8 * codes * scale
        slices = 16 if name.endswith("down_proj") else 1
        wanted = torch.stack([part.sum(dim=1) for part in sums.chunk(slices, dim=1)], dim=1)
        torch.testing.assert_close(stored[f"{name}.scale_bias"].double(), wanted, rtol=2.0**-23, atol=1e-30)
        plain = weight.abs().amax(dim=1, keepdim=True) / 7
        rounded = (weight / plain).round() * plain
        error, without = ((w - weight).square().sum(dim=1) for w in (codes * scale, rounded))
        # The scale that reaches the largest weight is among those tried; its codes are float32 quotients.
        assert bool((error <= without * (1 + 1e-6)).all())


def test_static_linears_follow_from_their_calibration(written: dict[str, Path]) -> None:
    stored, source = load_file(written["w8a8_static"] / WEIGHTS), source_of("tiny-qwen3")
    names = linears(written["w8a8_static"], "W8A8")
    ranges = measured(Path(), names)
    assert len(names) == 21
    for name in names:
        codes, deq = stored[f"{name}.weight"].double(), stored[f"{name}.deq_scale"]
        scale, offset = stored[f"{name}.input_scale"], stored[f"{name}.input_offset"].double()
        assert (scale.shape, deq.dtype, deq.shape) == ((1,), torch.float32, (len(codes),))
        assert is_bf16(scale)
        assert is_bf16(offset)
        assert abs(float(1 / (1 / scale.bfloat16()).double()) / float(scale) - 1) < 2e-3
        weight_scale = deq.double() / scale.double()
        weight = source[f"{name}.weight"]
        assert float(((codes * weight_scale[:, None] - weight).abs() / weight_scale[:, None]).max()) <= 0.5001
        assert torch.equal(stored[f"{name}.quant_bias"].double(), (-codes.sum(dim=1) * offset).round())
        low, high = (-128 - offset) * scale.double(), (127 - offset) * scale.double()
        assert float(low) <= ranges[name].low + float(scale) / 2
        assert float(high) >= ranges[name].high - float(scale) / 2
        assert f"{name}.weight_scale" not in stored


def test_parts_of_a_fused_layer_share_one_input_scale(written: dict[str, Path]) -> None:
    stored = load_file(written["w8a8_static"] / WEIGHTS)
    at = "model.layers.1.self_attn"
    for suffix in ("input_scale", "input_offset"):
        first, *others = (stored[f"{at}.{part}_proj.{suffix}"] for part in "qkv")
        assert all(torch.equal(first, other) for other in others)


def test_the_deepseek_mix_has_a_type_for_each_part(written: dict[str, Path]) -> None:
    types = entries(written["deepseek-w8a8"])
    at = "model.layers.1"
    for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"):
        assert types[f"{at}.self_attn.{part}.weight"] == "W8A8"
    for part in ("experts.0.gate_proj", "experts.15.down_proj", "shared_experts.up_proj"):
        assert types[f"{at}.mlp.{part}.weight"] == "W8A8_DYNAMIC"
    for name in (
        f"{at}.self_attn.kv_b_proj",
        f"{at}.mlp.gate",
        "lm_head",
        "model.embed_tokens",
        f"{at}.input_layernorm",
    ):
        assert types[f"{name}.weight"] == "FLOAT"
    assert (types["model_quant_type"], types["version"], types["group_size"]) == ("W8A8", "1.0.0", 0)


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8", "deepseek-w8a8"])
def test_every_tensor_is_described_and_prediction_layers_stay_float(scheme: str, written: dict[str, Path]) -> None:
    stored, types = load_file(written[scheme] / WEIGHTS), entries(written[scheme])
    assert stored.keys() == {n for n, k in types.items() if isinstance(k, str)} - {"version", "model_quant_type"}
    source = source_of("tiny-deepseek-v3-mtp")
    predicted = [n for n in source if n.startswith("model.layers.4.")]
    assert len(predicted) == 68
    for name in predicted:
        assert types[name] == "FLOAT"
        assert torch.equal(stored[name].double(), source[name])


def test_config_and_tokenizer_go_along(written: dict[str, Path]) -> None:
    config = json.loads((written["w8a8"] / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["model_type"], config["dtype"]) == ("deepseek_v3", "bfloat16")
    assert (written["w8a8"] / "tokenizer.json").is_file()
    assert not (written["w8a8"] / "model.safetensors").exists()


def test_a_run_that_stops_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_ascend_v1("tiny-qwen3", scheme="w8a8")
    calls = 0
    real = porter.checkpoint.convert._Run._convert

    def failing(self: object, output: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise KeyboardInterrupt
        real(self, output)  # type: ignore[arg-type]

    monkeypatch.setattr(porter.checkpoint.convert._Run, "_convert", failing)
    with pytest.raises(KeyboardInterrupt):
        write_ascend_v1(plan, tmp_path / "v1")
    assert not (tmp_path / "v1").exists()
    calls = 100
    write_ascend_v1(plan, tmp_path / "v1")
    assert calls - 100 == len(plan.outputs) - 19
    whole = write("tiny-qwen3", tmp_path / "whole", "w8a8")
    assert (tmp_path / "v1" / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()


def test_an_unfinished_run_with_other_input_scales_is_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("porter.ascend_v1.writer._write_files", lambda plan, directory: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write("tiny-qwen3", tmp_path / "v1", "w8a8_static")
    wide = lambda home, names: {name: Range(-9.0, 9.0) for name in names}  # noqa: E731
    write_ascend_v1(plan_ascend_v1("tiny-qwen3", scheme="w8a8_static", calibration=wide), tmp_path / "v1")
    name = "model.layers.0.self_attn.o_proj.input_scale"
    assert 0.07 < float(load_file(tmp_path / "v1" / WEIGHTS)[name]) < 0.08


def test_workers_change_no_byte_and_large_checkpoints_are_split(
    tmp_path: Path, written: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_ascend_v1("tiny-deepseek-v3-mtp", scheme="w8a8")
    write_ascend_v1(plan, tmp_path / "two", workers=2)
    assert (tmp_path / "two" / WEIGHTS).read_bytes() == (written["w8a8"] / WEIGHTS).read_bytes()
    monkeypatch.setattr("porter.ascend_v1.writer.SHARD_BYTES", 1_000_000)
    write_ascend_v1(plan, tmp_path / "split")
    files = sorted(p.name for p in (tmp_path / "split").glob("*.safetensors"))
    assert files[0] == f"quant_model_weights-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "split" / f"{WEIGHTS}.index.json").read_text())["weight_map"]
    for file in files:
        with safe_open(tmp_path / "split" / file, "pt") as opened:
            assert all(index[name] == file for name in opened.keys())
    assert index.keys() == load_file(written["w8a8"] / WEIGHTS).keys()
    assert check_directory(tmp_path / "split").findings == ()


@pytest.mark.parametrize(
    ("model", "scheme", "words"),
    [
        ("tiny-qwen3", "w4a8", "routed experts only"),
        ("tiny-qwen3-moe", "w8a16", "no W8A16 for moe"),
        ("tiny-qwen3", "deepseek-w8a8", "multi-head latent attention"),
        ("tiny-qwen3", "w3", "--scheme w3"),
        ("tiny-qwen3", "w8a8_static", "give --calibration"),
        ("tiny-deepseek-v4", "w8a8", "deepseek_v4"),
        ("deepseek-v3", "w8a8", "--weights"),
    ],
)
def test_what_would_not_load_is_refused_before_any_work(model: str, scheme: str, words: str) -> None:
    with pytest.raises(PorterError, match=words) as raised:
        plan_ascend_v1(model, scheme=scheme)
    assert "\n" not in str(raised.value)


def test_a_calibration_that_misses_a_linear_is_refused() -> None:
    with pytest.raises(PorterError, match=r"1 linears of static type have no range \(model.layers.2.mlp.down_proj\)"):
        plan_ascend_v1(
            "tiny-qwen3",
            scheme="w8a8_static",
            calibration=lambda home, names: {n: Range(-1, 1) for n in names if n != "model.layers.2.mlp.down_proj"},
        )


def test_broken_sources_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    source = resolve("tiny-qwen3").directory
    assert source is not None
    shutil.copytree(source, tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    plan = plan_ascend_v1(str(tmp_path / "model"), scheme="w8a8")
    with pytest.raises(PorterError, match=r"model\.layers\.0\.mlp\.up_proj\.weight: holds 1 NaN"):
        write_ascend_v1(plan, tmp_path / "v1")
    with pytest.raises(PorterError, match=r"model\.layers\.0\.mlp\.up_proj\.weight: the weight holds NaN"):
        write_ascend_v1(plan, tmp_path / "v1", allow_nonfinite=True)
    assert not (tmp_path / "v1").exists()
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(1, 1, dtype=torch.int8)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(PorterError, match="misshaped"):
        plan_ascend_v1(str(tmp_path / "model"), scheme="w8a8")


def test_the_plan_is_what_is_written(written: dict[str, Path]) -> None:
    plan = plan_ascend_v1("tiny-deepseek-v3-mtp", scheme="w4a8")
    assert description_of(plan) == json.loads((written["w4a8"] / DESCRIPTION).read_text())
    stored = load_file(written["w4a8"] / WEIGHTS)
    told = plan.to_json()
    assert told["tensors"] == len(stored)
    assert told["bytes"] == sum(t.numel() * t.element_size() for t in stored.values())
    assert told["linears"] == {"W4A8_DYNAMIC": 144, "W8A8_DYNAMIC": 28}
