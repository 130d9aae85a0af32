"""Configs that could be built but not run, or not be built, are refused by file and field."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV4Config,
    DeepseekV32Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from porter.errors import PorterError
from porter.models.config_rules import check_config
from porter.models.field_rules import check_fields
from porter.models.presets import preset, preset_names, read_config, shipped_directory

CONTRADICTIONS = [
    ({"num_experts_per_tok": 257}, "num_experts_per_tok is 257; must be at most n_routed_experts = 256"),
    ({"n_group": 3, "topk_group": 2}, "n_routed_experts is 256; must be a multiple of n_group = 3"),
    ({"topk_group": 9}, "topk_group is 9; must be at most n_group = 8"),
    ({"n_group": 256}, "n_routed_experts is 256; must be at least twice n_group = 256"),
    ({"topk_group": 1, "num_experts_per_tok": 33}, "num_experts_per_tok is 33; must be at most the experts of"),
    ({"n_group": 0}, "n_group is 0; must be at least 1"),
    ({"max_position_embeddings": -3}, "max_position_embeddings is -3; must be at least 1"),
    ({"num_key_value_heads": 64}, "num_key_value_heads is 64; must be num_attention_heads = 128"),
    ({"head_dim": 128}, "head_dim is 128; must be qk_rope_head_dim = 64, or be left out"),
    ({"qk_head_dim": 128}, r"qk_head_dim is 128; must be qk_nope_head_dim \+ qk_rope_head_dim"),
    ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; must be 'sigmoid'"),
    ({"moe_layer_freq": 2}, "moe_layer_freq is 2; must be 1"),
    ({"pad_token_id": 129280}, "pad_token_id is 129280; must be below vocab_size = 129280"),
    ({"hidden_act": "nope"}, "hidden_act is 'nope'; must be an activation"),
]


@pytest.mark.parametrize(("changes", "words"), CONTRADICTIONS)
def test_contradictions_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PorterError, match=f"x/config.json: {words}"):
        check_config(DeepseekV3Config(**changes), "x/config.json")


WRONG_FIELDS = [
    ({"index_topk": 0}, "index_topk is 0; must be at least 1"),
    ({"index_topk": -3}, "index_topk is -3; must be at least 1"),
    ({"linear_num_key_heads": 0}, "linear_num_key_heads is 0; must be at least 1"),
    ({"linear_key_head_dim": -1}, "linear_key_head_dim is -1; must be at least 1"),
    ({"linear_value_head_dim": 10**12}, "linear_value_head_dim is 1000000000000; must be at most 2147483647"),
    ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0; must be at least 1"),
    ({"hc_mult": 0}, "hc_mult is 0; must be at least 1"),
    ({"hc_sinkhorn_iters": 10**9}, "hc_sinkhorn_iters is 1000000000; must be at most 65536"),
    ({"hc_eps": -1.0}, "hc_eps is -1.0; must be a number from 0 to 1"),
    ({"swiglu_limit": -1.0}, "swiglu_limit is -1.0; must be a number from"),
    ({"num_nextn_predict_layers": 10**6}, "num_nextn_predict_layers is 1000000; must be at most 64"),
    ({"mtp_num_hidden_layers": 65}, "mtp_num_hidden_layers is 65; must be at most 64"),
    ({"auto_map": ["AutoConfig"]}, r"auto_map is \['AutoConfig'\]; must be an object"),
    ({"auto_map": {"AutoConfig": 5}}, "auto_map.AutoConfig is 5; must be module.Class"),
    ({"compress_rates": 7}, "compress_rates is 7; must be an object"),
    ({"compress_rates": {"a": 0}}, "compress_rates.a is 0; must be at least 1"),
    ({"compress_rates": {"a": None}}, "compress_rates.a is None; must be an integer"),
]


@pytest.mark.parametrize(("fields", "words"), WRONG_FIELDS)
def test_fields_of_sparse_linear_and_compressed_attention(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(PorterError, match=f"x: {words}"):
        check_fields(fields, "x")


def test_no_prediction_layers_may_be_null() -> None:
    check_fields({"num_nextn_predict_layers": None}, "x")


def test_heads_of_linear_attention_and_of_indexers_fit_each_other() -> None:
    with pytest.raises(PorterError, match="linear_num_value_heads is 33; must be a multiple of linear_num_key_heads"):
        check_config(Qwen3NextConfig(linear_num_value_heads=33), "x/config.json")
    with pytest.raises(PorterError, match="num_attention_heads is 64; must be a multiple of o_groups = 3"):
        check_config(DeepseekV4Config(o_groups=3), "x/config.json")
    with pytest.raises(PorterError, match="index_head_dim is 8; must be at least qk_rope_head_dim = 64"):
        check_config(DeepseekV32Config(index_head_dim=8), "x/config.json")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"topk_method": "noaux"}, "topk_method is 'noaux'; must be 'greedy' or 'group_limited_greedy', which"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; must be 'softmax', which"),
        ({"norm_topk_prob": True}, "norm_topk_prob is True; must be False, which"),
    ],
)
def test_routing_that_transformers_does_not_compute(fields: dict[str, Any], words: str) -> None:
    check_config(DeepseekV2Config(), "x")
    with pytest.raises(PorterError, match=f"x: {words}"):
        check_config(DeepseekV2Config(**fields), "x")


def test_layers_of_a_type_that_the_model_has_no_code_for() -> None:
    kinds = ["indexed_attention", "full_attention"]
    with pytest.raises(PorterError, match="layer_types names 'full_attention'; must be of indexed_attention"):
        check_config(DeepseekV32Config(num_hidden_layers=2, layer_types=kinds), "x/config.json")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("mrope_section", 5, "mrope_section is 5; must be a list"),
        ("mrope_section", ["a"], "mrope_section is .'a'.; must be a list"),
        ("mrope_section", [-8, 36, 36], "mrope_section is .-8, 36, 36.; must be a list"),
        ("patch_size", [14, 14], "vision_config.patch_size is .14, 14.; must be one number"),
        ("fullatt_block_indexes", [99], "vision_config.fullatt_block_indexes is .99.; must be blocks"),
    ],
)
def test_fields_of_vision_models(field: str, value: Any, words: str) -> None:
    config = preset("qwen2.5-vl-7b").config()
    check_config(config, "x")
    if field == "mrope_section":
        config.get_text_config().rope_parameters[field] = value
    else:
        setattr(config.vision_config, field, value)
    with pytest.raises(PorterError, match=words):
        check_config(config, "x")


def test_heads_must_divide() -> None:
    with pytest.raises(PorterError, match="num_attention_heads is 32; must be a multiple of num_key_value_heads = 5"):
        check_config(Qwen3Config(num_key_value_heads=5), "x/config.json")
    with pytest.raises(PorterError, match="hidden_size is 100; must be a multiple of num_attention_heads = 32"):
        check_config(Qwen2Config(hidden_size=100), "x/config.json")


@pytest.mark.parametrize("name", ["short_factor", "long_factor"])
def test_longrope_needs_a_factor_for_each_pair(name: str) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "rope_theta": 1e4}
    rope |= {"original_max_position_embeddings": 4096, "factor": 8.0}
    check_config(Qwen3Config(head_dim=128, rope_parameters=rope), "x/config.json")
    with pytest.raises(PorterError, match=rf"rope_parameters\.{name} has 63 factors; must have 64"):
        check_config(Qwen3Config(head_dim=128, rope_parameters=rope | {name: [1.0] * 63}), "x/config.json")


def test_a_null_head_dim_of_latent_attention_is_named() -> None:
    with pytest.raises(PorterError, match="x: head_dim is None; must be qk_rope_head_dim, or be left out"):
        check_fields({"kv_lora_rank": 512, "head_dim": None}, "x")


WRONG_FIELDS = [
    ("hidden_size", -8, "must be at least 1"),
    ("hidden_size", "128", "must be an integer"),
    ("hidden_size", True, "must be an integer"),
    ("hidden_size", 2**31, "must be at most 2147483647"),
    ("num_hidden_layers", 10**9, "must be at most 4096"),
    ("vocab_size", None, "must be an integer"),
    ("head_dim", 1.5, "must be an integer"),
    ("first_k_dense_replace", -1, "must be at least 0"),
    ("pad_token_id", -1, "must be a token id or null"),
    ("eos_token_id", [1, "a"], "must be a token id, a list of them or null"),
    ("rms_norm_eps", math.nan, "must be a number from 0 to 1"),
    ("rope_theta", "1e4", "must be a number"),
    ("attention_bias", "false", "must be true or false"),
    ("dtype", "int8", "must be a floating-point dtype"),
    ("torch_dtype", 16, "must be a floating-point dtype"),
    ("architectures", "Qwen3ForCausalLM", "must be a list of class names"),
    ("rope_parameters", [], "must be an object"),
    ("rope_scaling", {"type": "spiral"}, "must be one of default"),
    ("rope_parameters", {"rope_type": "linear", "factor": -2}, "must be a positive number"),
    ("rope_parameters", {"rope_type": "longrope", "short_factor": 3}, "must be a positive number"),
]


@pytest.mark.parametrize(("field", "value", "words"), WRONG_FIELDS)
def test_wrong_types_and_ranges_are_named(field: str, value: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(PorterError, match=rf"x: {field}.* is .*; {words}"):
        check_fields({field: value}, "x")
    shipped = shipped_directory("tiny-qwen3")
    assert shipped is not None
    fields = json.loads((shipped / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {field: value}))
    with pytest.raises(PorterError, match=rf"{tmp_path}/config.json: {field}"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", preset_names())
def test_released_configs_pass(name: str) -> None:
    check_fields(preset(name).fields, name)
    check_config(preset(name).config(), name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "expected a JSON object"),
        ("{", "not valid JSON"),
        ('{"eos_token_id": "end"}', "eos_token_id is 'end'; must be a token id, a list of them or null"),
        ('{"temperature": "hot", "do_sample": true}', "temperature is 'hot'; must be a number, or null"),
        ('{"cache_implementation": "paper"}', "correct it or remove it"),
    ],
)
def test_generation_config_is_read_with_the_model(text: str, words: str, tmp_path: Path) -> None:
    shipped = shipped_directory("tiny-qwen3")
    assert shipped is not None
    (tmp_path / "config.json").write_text((shipped / "config.json").read_text())
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(PorterError, match=rf"{tmp_path}/generation_config.json: .*{words}"):
        read_config(tmp_path)
