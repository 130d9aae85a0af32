"""Hybrids of gated delta nets and attention: Qwen3-Next, Qwen3.5, Qwen3.5-MoE and OLMo-Hybrid."""

from __future__ import annotations

import copy
import importlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import DynamicCache

from porter.adaptation import adapt
from porter.generation import generate
from porter.kernels.dispatch import usage
from porter.kv_cache import StateLayer, cache_for
from porter.models.family import families, family_of
from porter.models.proof import BOUND, prove_model
from porter.models.proof_parts import PARTS
from porter.models.reduce import randomise, reduced_config
from porter.models.rewrite import Mismatch
from porter.models.rewrites.gated_attention import GatedAttention
from porter.models.rewrites.gated_delta_net import GatedDeltaNet
from porter.models.rewrites.gated_norm import GatedRMSNorm
from porter.models.rewrites.hybrid_layer import HybridLayer
from porter.models.rewrites.shared_expert import GatedSharedExpert
from porter.plan import kv_bytes_per_token, state_bytes
from porter.precision import float64_mode
from porter.runtime import load

FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
WIDTHS = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 14,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def config_of(model_type: str, **changes: Any) -> Any:
    config_class = transformers.CONFIG_MAPPING[model_type]
    known = config_class().to_dict().keys()
    return config_class(**{k: v for k, v in {**WIDTHS, **changes}.items() if k in known or k in changes})


def source_of(model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    family = family_of(model_type)
    upstream = getattr(importlib.import_module(family.module), family.class_name)
    return randomise(upstream(config_of(model_type, **changes)).to(dtype)).eval()


def port_of(source: Any, model_type: str, **changes: Any) -> Any:
    family = family_of(model_type)
    config = config_of(model_type, **changes)
    ported_source = family.port(config)
    ported = ported_source.model_class()(config)
    ported.load_state_dict(family.correspondence(config, ported_source).convert(source.state_dict()))
    return ported.to(next(source.parameters()).dtype).eval()


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    source = source_of(request.param)
    return source, port_of(source, request.param)


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(length))


def fed(model: Any, ids: torch.Tensor, sizes: list[int], cache: Any) -> torch.Tensor:
    with torch.no_grad():
        pieces = [model(piece, cache=cache, use_cache=True).logits for piece in ids.split(sizes, dim=1)]
    return torch.cat(pieces, dim=1)


def error(candidate: torch.Tensor, reference: torch.Tensor) -> float:
    return float((candidate - reference).norm() / reference.norm())


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"linear_conv_kernel_dim": 2}])
def test_float64_proof(model_type: str, changes: dict[str, Any]) -> None:
    source = families()[model_type].port(config_of(model_type, **changes))
    assert set(source.proof.errors) == set(PARTS) and max(source.proof.errors.values()) < BOUND
    assert not source.near_misses
    assert {c.candidate.rewrite for c in source.classes} == set(families()[model_type].expected)


def test_olmo_hybrid_fits_without_a_family_of_its_own() -> None:
    source = family_of("olmo_hybrid").port(transformers.CONFIG_MAPPING["olmo_hybrid"]())
    ported = {c.candidate.rewrite for c in source.classes}
    assert {"gated_delta_net", "gated_rms_norm"} <= ported and source.proof.passed


def test_every_parameter_of_a_gated_delta_net_matters_to_the_proof() -> None:
    small = reduced_config(config_of("qwen3_next"))
    family = families()["qwen3_next"]
    upstream = getattr(importlib.import_module(family.module), family.class_name)
    source = randomise(upstream(small).double())
    ported_source = family.port(small)
    ported: Any = ported_source.model_class()(small).double()
    ported.load_state_dict(family.correspondence(small, ported_source).convert(source.state_dict()))
    state = ported.state_dict()
    for name in [n for n in state if ".layers.0.linear_attn." in n or ".layers.0.mlp.shared" in n]:
        before = state[name].clone()
        state[name].mul_(1 + 1e-3 * torch.randn_like(state[name]))
        assert max(prove_model(source, ported).errors.values()) > BOUND, name
        state[name].copy_(before)


def test_generation_equals_transformers_for_64_tokens(pair: tuple[Any, Any]) -> None:
    source, ported = pair
    ids = tokens(2, 37)
    with torch.no_grad():
        theirs = source.generate(ids, max_new_tokens=64, do_sample=False, pad_token_id=0)[:, 37:]
        assert torch.equal(ported.generate(ids, max_new_tokens=64, do_sample=False, pad_token_id=0)[:, 37:], theirs)
    steps = list(generate(ported, ids, 64))
    assert torch.equal(torch.stack([step.tokens for step in steps], dim=1), theirs)
    assert not any(row["fallbacks"] for row in usage(ported))
    assert steps[-1].refusal == "layers of linear attention replace their states at each step"


def test_a_left_padded_batch_generates_what_its_rows_do_alone(pair: tuple[Any, Any]) -> None:
    source, ported = pair
    ids, mask = tokens(2, 23), torch.ones(2, 23, dtype=torch.long)
    mask[0, :9] = 0
    with torch.no_grad():
        wanted = source.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0)
        ours = ported.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0)
        alone = ported.generate(ids[:1, 9:], max_new_tokens=24, do_sample=False, pad_token_id=0)
    assert torch.equal(ours, wanted)
    assert torch.equal(ours[0, 23:], alone[0, 14:])


@pytest.mark.parametrize("kind", ["transformers", "porter"])
def test_a_prompt_of_1100_tokens_in_pieces_is_the_prompt_at_once(pair: tuple[Any, Any], kind: str) -> None:
    source, ported = (copy.deepcopy(model) for model in pair)
    routed = hasattr(ported.config, "num_experts")
    if routed:  # in float32 a router may choose another expert by rounding alone
        source.set_experts_implementation("eager")  # its grouped product has no float64
        source, ported = source.double(), ported.double()
    ids = tokens(1, 1100)
    cache = DynamicCache(config=ported.config) if kind == "transformers" else cache_for(ported.config, 1100)
    with torch.no_grad(), float64_mode() if routed else nullcontext():
        whole, theirs = ported(ids).logits, source(ids).logits
        pieces = fed(ported, ids, [300, 1, 260, 5, 64, 3, 3, 400, *[1] * 64], cache)
    # In float32, upstream's own pieces differ from its whole by about 4e-6 here.
    bound = 1e-10 if routed else 2e-5
    assert error(whole, theirs) < bound
    assert error(pieces, whole) < bound


def test_crops_of_a_recorded_past_are_upstreams(pair: tuple[Any, Any]) -> None:
    """Assisted decoding keeps more of the convolution's inputs than the kernel needs."""
    source, ported = pair
    ids = tokens(1, 24)
    outputs = []
    for model in (source, ported):
        cache = DynamicCache(config=model.config)
        for layer in cache.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        outputs.append(fed(model, ids, [12, 1, 1, 5, 5], cache))
    assert error(outputs[1], outputs[0]) < 2e-5


def test_porters_cache_keeps_states_in_float32_and_does_not_copy_them() -> None:
    layer = StateLayer()
    state = torch.zeros(1, 2, 3, 4)
    assert layer.update_recurrent_state(state) is state
    config = config_of("qwen3_next")
    kinds = [type(each).__name__ for each in cache_for(config, 8).layers]
    assert kinds == ["StateLayer", "StateLayer", "StateLayer", "ContiguousLayer"]
    source = source_of("qwen3_next", torch.bfloat16)
    ported = port_of(source, "qwen3_next")
    cache = cache_for(ported.config, 20)
    fed(ported, tokens(1, 20), [17, 1, 1, 1], cache)
    first: Any = cache.layers[0]
    assert first.recurrent_states[0].dtype == torch.float32 and first.conv_states[0].dtype == torch.bfloat16
    assert int(cache.get_seq_length()) == 20


def test_the_plan_counts_keys_of_full_attention_alone_and_names_the_states() -> None:
    config = config_of("qwen3_next")
    assert kv_bytes_per_token(config, 2) == 2 * 2 * 20 * 2
    with torch.device("meta"):
        model = families()["qwen3_next"].port(config).model_class()(config)
    channels = 2 * 2 * 12 + 6 * 14
    assert state_bytes(model, 2) == 3 * (4 * 6 * 12 * 14 + 2 * 4 * channels)


def near_miss(rewrite: Any, module: nn.Module) -> str:
    found = rewrite.candidates(module)
    assert isinstance(found, Mismatch), found
    return found.reason


def test_near_misses_explain_themselves() -> None:
    layers = source_of("qwen3_next").get_submodule("model.layers")
    delta_net: Any = layers.get_submodule("0.linear_attn")
    delta_net.activation = "gelu"
    assert "followed by gelu" in near_miss(GatedDeltaNet(), delta_net)
    delta_net.extra = nn.Linear(2, 2)
    assert "unknown projections" in near_miss(GatedDeltaNet(), delta_net)
    delta_net.norm.activation = "sigmoid"
    assert "gated by sigmoid" in near_miss(GatedRMSNorm(), delta_net.norm)
    del delta_net.dt_bias
    assert "no attribute dt_bias" in near_miss(GatedDeltaNet(), delta_net)
    attention: Any = layers.get_submodule("3.self_attn")
    attention.sliding_window = 7
    assert "a sliding window" in near_miss(GatedAttention(), attention)
    attention.indexer = nn.Linear(2, 2)
    assert "parts differ: indexer" in near_miss(GatedAttention(), attention)
    block: Any = layers.get_submodule("0.mlp")
    block.shared_expert_gate = nn.Linear(48, 2)
    assert "no linear of one row" in near_miss(GatedSharedExpert(), block)
    block.extra = nn.Linear(2, 2)
    assert "parts that differ: extra" in near_miss(GatedSharedExpert(), block)
    layers.get_submodule("0").register_module("self_attn", nn.Linear(2, 2))
    assert "one mixer" in near_miss(HybridLayer(), layers.get_submodule("0"))


def test_a_checkpoint_of_qwen3_5_with_its_vision_tower_is_ported_whole(tmp_path: Path) -> None:
    """Released Qwen3.5 checkpoints hold the text model as model.language_model, beside a vision tower."""
    text = {**config_of("qwen3_5_text", head_dim=64).to_dict(), "layer_types": None}
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [4, 2, 2]}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 48}
    ids = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    config_class: Any = transformers.CONFIG_MAPPING["qwen3_5"]
    config = config_class(text_config=text, vision_config=vision, **ids)
    source: Any = randomise(transformers.Qwen3_5ForConditionalGeneration(config).float()).eval()
    source.save_pretrained(tmp_path / "source")
    port = adapt(tmp_path / "source", "cpu", scheme="fp32", output=tmp_path / "port", strict=True)
    assert {"gated_delta_net", "gated_attention"} <= {c.candidate.rewrite for c in port.source.classes}
    assert port.plan.state_bytes > 0
    prompt = tokens(1, 20) % 89 + 1
    with torch.no_grad():
        theirs = source.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=0)[0, 20:]
    steps = list(generate(load(tmp_path / "port"), prompt, 16))
    assert torch.equal(torch.cat([step.tokens for step in steps]), theirs)
