"""Ports are proven: every family, planted mistakes refused, near misses explained."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
import transformers

from porter.errors import PorterError
from porter.models import search
from porter.models.family import FAMILY_FILES, families, family_of
from porter.models.port import port_source
from porter.models.proof import BOUND, module_error, prove_model
from porter.models.proof_parts import PARTS
from porter.models.reduce import randomise, reduced_config
from porter.models.rewrites import REWRITES
from porter.models.search import Search, correspondence_of


def config_of(model_type: str, **changes: Any) -> Any:
    family = families()[model_type]
    return getattr(importlib.import_module(family.module), family.class_name).config_class(**changes)


VARIANTS = [
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    ("deepseek_v3", {}),
    ("deepseek_v3", {"q_lora_rank": None}),
    ("deepseek_v3", {"rope_interleave": False, "attention_bias": True}),
    (
        "deepseek_v3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 40.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 8,
            }
        },
    ),
]


@pytest.mark.parametrize(("model_type", "changes"), VARIANTS)
def test_float64_proof(model_type: str, changes: dict[str, Any]) -> None:
    family = families()[model_type]
    source = family.port(config_of(model_type, **changes))
    assert source.proof.passed and set(source.proof.errors) == set(PARTS)
    assert max(source.proof.errors.values()) < BOUND
    assert {c.candidate.rewrite for c in source.classes} == set(family.expected)
    assert not source.near_misses


def test_half_rope_is_chosen_where_the_config_asks_for_it() -> None:
    family = families()["deepseek_v3"]
    variants = {
        interleave: {c.candidate.rewrite: c.candidate.variant for c in family.port(
            config_of("deepseek_v3", rope_interleave=interleave)).classes}["mla_attention"]
        for interleave in (True, False)
    }  # fmt: skip
    assert variants == {True: "interleaved rope", False: "half rope"}


def proof_parts(model_type: str) -> tuple[Any, Any, Any]:
    family = families()[model_type]
    small = reduced_config(config_of(model_type))
    source = randomise(getattr(importlib.import_module(family.module), family.class_name)(small).double())
    ported_source = family.port(config_of(model_type))
    ported: Any = ported_source.model_class()(small).double()
    correspondence = correspondence_of(source, {c.name: c.candidate for c in ported_source.classes})
    ported.load_state_dict(correspondence.convert(source.state_dict()))
    return source, ported, correspondence


@pytest.mark.parametrize("model_type", FAMILY_FILES)
def test_every_parameter_matters_to_the_proof(model_type: str) -> None:
    """A change of 1e-3 in any one parameter must fail it: a proof blind to a weight proves nothing about it."""
    source, ported, _ = proof_parts(model_type)
    assert prove_model(source, ported).passed
    torch.manual_seed(0)
    state = ported.state_dict()
    for name in [n for n in state if ".layers.1." in n or n in ("model.norm.weight", "lm_head.weight")]:
        before = state[name].clone()
        # The correction bias only chooses experts, and an indexer keys: a small change need not show.
        size = 30.0 if name.endswith("correction_bias") or ".indexer." in name else 1e-3
        state[name].mul_(1 + size * torch.randn_like(state[name]))
        error = max(prove_model(source, ported).errors.values())
        state[name].copy_(before)
        assert error > BOUND, name


def test_a_wrong_variant_is_refused() -> None:
    family = families()["qwen3"]
    found = Search.begin(config_of("qwen3"), family.module, family.class_name, "cpu", REWRITES)
    source, small = found.source, found.config
    standard, zero_centered = found.waiting["Qwen3RMSNorm"]
    assert (standard.variant, zero_centered.variant) == ("standard", "zero_centered")
    found.waiting["Qwen3RMSNorm"] = [zero_centered]
    from porter.models.generated import import_text
    from porter.models.modelling_source import ported_text

    module = import_text(ported_text(family.module, found.chosen(), "cpu"), "modeling_wrong")
    ported = getattr(module, family.class_name)(small).double()
    ported.load_state_dict(correspondence_of(source, found.chosen()).convert(source.state_dict()))
    assert module_error(ported.get_submodule("model.norm"), found.calls["model.norm"]) > 1e-3


def test_near_misses_explain_themselves() -> None:
    family = families()["qwen3"]
    with pytest.raises(PorterError, match=r"gated_mlp.*none of its child modules computes silu"):
        family.port(config_of("qwen3", hidden_act="gelu"))


def test_types_without_a_causal_language_model_are_named() -> None:
    with pytest.raises(PorterError, match=r"model_type: transformers has no causal language model of type 'clip'"):
        family_of("clip")


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_models_that_no_family_lists_are_matched_by_structure(model_type: str) -> None:
    family = family_of(model_type)
    source = family.port(transformers.CONFIG_MAPPING[model_type]())
    assert {c.candidate.rewrite for c in source.classes} == {"rms_norm", "gated_mlp", "attention", "decoder_layer"}
    assert source.proof.passed and family.special


def test_correspondence_round_trip_is_exact() -> None:
    source, _, correspondence = proof_parts("deepseek_v3")
    state = source.state_dict()
    back = correspondence.invert(correspondence.convert(state))
    assert back.keys() == state.keys() and all(torch.equal(back[n], state[n]) for n in state)
    assert type(correspondence).from_json(correspondence.to_json()) == correspondence


def test_ports_do_not_change_transformers() -> None:
    from transformers.models.qwen3 import modeling_qwen3

    before = dict(vars(modeling_qwen3))
    port_source(config_of("qwen3"), modeling_qwen3.__name__, "Qwen3ForCausalLM", "cpu")
    assert {k: v for k, v in vars(modeling_qwen3).items() if before.get(k) is not v} == {}


def test_the_proof_runs_on_one_thread_and_puts_the_number_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    prove = search.prove_model

    def counting(*models: torch.nn.Module) -> Any:
        seen.append(torch.get_num_threads())
        return prove(*models)

    monkeypatch.setattr(search, "prove_model", counting)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        family_of("qwen3").port(config_of("qwen3", rms_norm_eps=1.5e-6))
        assert (seen, torch.get_num_threads()) == ([1], 3)
    finally:
        torch.set_num_threads(before)


def test_a_port_made_in_inference_mode_is_proven_all_the_same() -> None:
    with torch.inference_mode():
        source = family_of("qwen3").port(config_of("qwen3", rms_norm_eps=2.5e-6))
    assert source.proof.passed and not source.near_misses


def test_what_only_the_port_raises_is_told() -> None:
    source = randomise(transformers.Qwen3ForCausalLM(reduced_config(config_of("qwen3"))).double())
    ported = copy.deepcopy(source)

    def fail(module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        if arguments[0].shape[1] == 1:
            raise KeyError("state")

    ported.register_forward_pre_hook(fail)
    proof = prove_model(source, ported)
    assert not proof.passed and proof.errors["prefill"] == 0
    assert proof.worst() == "decode: it raises KeyError: 'state'"
