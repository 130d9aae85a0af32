"""Configs that could be built but not run are refused by field."""

from __future__ import annotations

import pytest
from transformers import DeepseekV3Config, Qwen3Config

from porter.errors import PorterError
from porter.models.config_rules import check_config
from porter.models.presets import preset, preset_names

REFUSED = [
    ({"num_experts_per_tok": 257}, "num_experts_per_tok is 257; must be at most n_routed_experts = 256"),
    ({"n_group": 3, "topk_group": 2}, "n_routed_experts is 256; must be a multiple of n_group = 3"),
    ({"topk_group": 9}, "topk_group is 9; must be at most n_group = 8"),
    ({"n_group": 0}, "n_group is 0; must be at least 1"),
    ({"max_position_embeddings": -3}, "max_position_embeddings is -3; must be at least 1"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_contradictions_are_named(changes: dict[str, int], words: str) -> None:
    with pytest.raises(PorterError, match=f"x/config.json: {words}"):
        check_config(DeepseekV3Config(**changes), "x/config.json")


def test_heads_must_divide() -> None:
    with pytest.raises(PorterError, match="num_attention_heads is 32; must be a multiple of num_key_value_heads = 5"):
        check_config(Qwen3Config(num_key_value_heads=5), "x/config.json")


@pytest.mark.parametrize("name", preset_names())
def test_released_configs_pass(name: str) -> None:
    check_config(preset(name).config(), name)
