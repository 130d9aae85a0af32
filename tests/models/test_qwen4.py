"""Qwen4 as far as transformers' class goes: what fits is ported, the rest is named, and the text stays the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

import porter
from porter.errors import PorterError
from porter.generation import generate
from porter.models.config_rules import check_config
from porter.models.family import family_of
from porter.models.reduce import randomise, reduced_config

INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
TEXT: dict[str, Any] = {
    **INDEXER,
    "hidden_size": 2560,
    "num_hidden_layers": 8,
    "num_attention_heads": 24,
    "linear_num_value_heads": 48,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "ple_layer_ids": [2, 6],
    "eos_token_id": 248044,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
PORTED = {"gated_delta_net", "gated_rms_norm", "gated_mlp", "router", "experts", "shared_expert"}
LEFT = {
    "Qwen4ExpTextRMSNorm": "an RMSNorm over groups of 48",
    "Qwen4ExpTextAttention": "attention with an output gate whose parts differ: indexer",
    "Qwen4ExpTextQSAIndexer": "no rewrite knows it",
    "Qwen4ExpTextGatedResidual": "no rewrite knows it",
    "Qwen4ExpTextNGramEmbedding": "no rewrite knows it",
    "Qwen4ExpTextPLELayer": "no rewrite knows it",
    "Qwen4ExpTextDecoderLayer": "attn_hyper_connection",
}


def text_config(**changes: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = CONFIG_MAPPING["qwen4_exp_text"](**{**TEXT, **changes})
    return config


@pytest.mark.parametrize("model_type", ["qwen4_exp_text", "qwen4_exp"])
def test_what_fits_is_ported_and_the_rest_has_its_reason(model_type: str) -> None:
    nested = model_type == "qwen4_exp"
    config = CONFIG_MAPPING[model_type](text_config=TEXT, vision_config={}) if nested else text_config()
    source = family_of(model_type).port(config)
    assert {c.candidate.rewrite for c in source.classes} == PORTED | ({"vision_attention"} if nested else set())
    assert source.proof.passed and not source.proof.skipped
    for name, reason in LEFT.items():
        assert reason in source.left[name]


def test_reduced_width_has_every_kind_of_layer() -> None:
    small = reduced_config(text_config())
    assert small.layer_types == ["linear_attention", "linear_attention", "indexed_attention"]
    assert small.ple_layer_ids == [2] and small.indexer_budget % small.indexer_compress_ratio == 0
    # The indexer chooses among the tokens of a proof, and the tables of n-grams are small.
    assert small.indexer_budget < 12 and small.ngram_vocab_size_base < 100
    assert small.eos_token_id == small.vocab_size - 1


@pytest.mark.parametrize("changes", [{}, {"ple_layer_ids": []}, {"output_gate_type": "sigmoid"}])
def test_generation_is_that_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    config = reduced_config(text_config(**changes))
    config.max_position_embeddings, config.split_ngram_parts = 128, 2
    randomise(AutoModelForCausalLM.from_config(config)).save_pretrained(tmp_path / "source")
    porter.adapt(tmp_path / "source", scheme="fp32", output=tmp_path / "port")
    upstream: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    prompt = torch.randint(0, 60, (1, 17), generator=torch.Generator().manual_seed(3))
    expected = upstream.generate(prompt, max_new_tokens=48, do_sample=False, eos_token_id=None)[:, 17:]
    steps = generate(porter.load(tmp_path / "port"), prompt, 48)
    assert torch.equal(torch.stack([step.tokens for step in steps], dim=1), expected)


def test_an_indexer_that_is_left_out_is_named() -> None:
    check_config(text_config(), "x")
    bare = text_config(**dict.fromkeys(INDEXER))
    with pytest.raises(PorterError, match="x: indexer_n_heads is None; must be an integer, since layer_types names"):
        check_config(bare, "x")
