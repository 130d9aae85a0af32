"""Every conversion that transformers applies to a checkpoint is understood by value, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter, WeightRenaming

from porter.errors import PorterError
from porter.models.checkpoint_layout import checkpoint_layout
from porter.models.reduce import randomise, reduced_config

STORED_OTHERWISE = ["qwen2_moe", "deepseek_v3", "minimax_m2", "mixtral", "jamba", "granitemoe", "olmoe"]


def small(model_type: str, **changes: Any) -> Any:
    config = reduced_config(CONFIG_MAPPING[model_type](**changes))
    return randomise(AutoModelForCausalLM.from_config(config).float())


@pytest.mark.parametrize("model_type", [*STORED_OTHERWISE, "qwen3", "phi3"])
def test_what_save_pretrained_wrote_is_joined_to_the_models_own_tensors(model_type: str, tmp_path: Path) -> None:
    model = small(model_type)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    with torch.device("meta"):
        upstream = type(model)(model.config)
    layout = checkpoint_layout(upstream, stored)
    assert bool(layout.entries) == (model_type in STORED_OTHERWISE)
    back = layout.convert(stored)
    state = model.state_dict()
    assert back.keys() <= state.keys()
    assert all(torch.equal(back[name], state[name]) for name in back)
    assert state.keys() - back.keys() <= {"lm_head.weight"}
    again = layout.invert(back)
    assert again.keys() == stored.keys() and all(torch.equal(again[name], stored[name]) for name in stored)
    for entry in layout.entries:
        shape = tuple(state[entry.target].shape)
        assert [entry.source_shape(i, shape) for i in range(len(entry.sources))] == [
            tuple(stored[source].shape) for source in entry.sources
        ]


def test_a_checkpoint_that_keeps_the_models_own_names_is_read_as_it_is(tmp_path: Path) -> None:
    model = small("minimax_m2")
    model.save_pretrained(tmp_path, save_original_format=False)
    stored = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj" in stored
    assert checkpoint_layout(model, stored).entries == ()


def test_a_prefix_is_read_where_the_checkpoint_has_it() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(reduced_config(CONFIG_MAPPING["qwen3_5_text"]()))
    plain = "model.layers.0.input_layernorm.weight"
    released = "model.language_model.layers.0.input_layernorm.weight"
    assert checkpoint_layout(model, {released}).source_of(plain) == (released,)
    assert checkpoint_layout(model, {plain}).source_of(plain) == (plain,)


@pytest.mark.parametrize(
    ("conversion", "operation"),
    [
        (WeightConverter("q_kernel", "self_attn.q_proj.weight", [Transpose(0, 1)]), "Transpose"),
        (
            WeightConverter(
                "qkv.weight",
                ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
                [conversion_mapping.Chunk(dim=0)],
            ),
            "Chunk",
        ),
    ],
)
def test_a_conversion_that_is_not_understood_is_refused_by_name(
    conversion: WeightConverter, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda *a, **k: [conversion])
    with pytest.raises(PorterError, match=rf"q_proj\.weight through the conversion {operation}, which porter"):
        checkpoint_layout(small("llama"))


def test_a_renaming_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    rename = [WeightRenaming(r"\.attention\.", ".self_attn.")]
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda *a, **k: rename)
    layout = checkpoint_layout(small("llama"))
    assert layout.source_of("model.layers.1.self_attn.q_proj.weight") == ("model.layers.1.attention.q_proj.weight",)
