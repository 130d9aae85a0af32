"""DeepSeek-V2: each form of its routing, query and rope is proven; the shipped checkpoint decodes as upstream does."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter, apply_rotary_emb

import porter
from porter.generation import generate
from porter.kernels.dispatch import usage
from porter.kernels.reference.grouped_softmax import router_grouped_softmax
from porter.kernels.reference.rope import rope_complex
from porter.models.family import families
from porter.models.port import port_source
from porter.models.presets import preset, preset_names, shipped_directory
from porter.models.proof import BOUND
from porter.models.proof_parts import PARTS

NAME = "tiny-deepseek-v2"
FAMILY = "deepseek_v2"
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 8,
}


def source_directory() -> Path:
    found = shipped_directory(NAME)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("v2") / "port"
    porter.adapt(NAME, scheme="fp32", output=directory, strict=True)
    return directory


@pytest.fixture(scope="module")
def pair(exported: Path) -> tuple[Any, Any]:
    original: Any = AutoModelForCausalLM.from_pretrained(source_directory(), dtype=torch.float32)
    return original.eval(), porter.load(exported)


def words(count: int, start: int = 900) -> torch.Tensor:
    text = (Path(porter.models.__file__).parent / "shipped" / "text" / "persuasion.txt").read_bytes()
    return torch.tensor([[256, *text[start : start + count - 1]]])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": None},
        {**GROUPS, "rope_parameters": YARN},
        {**GROUPS, "q_lora_rank": None, "attention_bias": True},
        {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "first_k_dense_replace": 0, "mlp_bias": True},
    ],
)
def test_float64_proof(changes: dict[str, Any]) -> None:
    family = families()[FAMILY]
    source = family.port(DeepseekV2Config(num_experts_per_tok=6, **changes))
    assert set(source.proof.errors) == set(PARTS) and max(source.proof.errors.values()) < BOUND
    variants = {c.candidate.rewrite: c.candidate.variant for c in source.classes}
    assert set(variants) == set(family.expected) and not source.near_misses
    assert variants["mla_attention"] == "complex rope"
    assert variants["router"] == ("grouped_softmax" if "topk_method" in changes else "softmax, scaled")


def test_another_way_of_choosing_is_a_near_miss() -> None:
    from porter.models.rewrite import Mismatch
    from porter.models.rewrites.grouped_softmax_router import GroupedSoftmaxRouter

    router = DeepseekV2TopkRouter(DeepseekV2Config(num_experts_per_tok=2))
    router.topk_method = "noaux_tc"
    found = GroupedSoftmaxRouter().candidates(router)
    assert isinstance(found, Mismatch) and "'noaux_tc', neither greedy nor group_limited_greedy" in found.reason


def test_a_router_without_its_scale_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof of the router itself fails, so the class stays upstream's and the family says what it lacks."""
    from porter.models.rewrites import grouped_softmax_router

    class Unscaled(grouped_softmax_router.GroupedSoftmaxForward):
        def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            flat = hidden_states.reshape(-1, hidden_states.shape[-1])
            return self.router(flat, self.weight, self.top_k, *self.groups, 1.0)

    monkeypatch.setattr(grouped_softmax_router, "GroupedSoftmaxForward", Unscaled)
    family = families()[FAMILY]
    source = port_source(DeepseekV2Config(num_experts_per_tok=6, **GROUPS), family.module, family.class_name, "cpu")
    assert "router" not in {c.candidate.rewrite for c in source.classes}
    assert "float64 proof gives relative error" in source.near_misses["DeepseekV2TopkRouter"]


def test_the_ops_are_upstreams_functions() -> None:
    generator = torch.Generator().manual_seed(7)
    query, key = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (3, 1))
    angles = torch.polar(torch.full((2, 5, 4), 1.2), torch.randn(2, 5, 4, generator=generator))
    for ours, theirs in zip(rope_complex(query, key, angles), apply_rotary_emb(query, key, angles), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    sizes = {"num_experts_per_tok": 3, "hidden_size": 24, "num_attention_heads": 4, "n_routed_experts": 12}
    config = DeepseekV2Config(**sizes, **GROUPS)
    router = DeepseekV2TopkRouter(config)
    torch.nn.init.normal_(router.weight, generator=generator)
    hidden = torch.randn(9, 24, generator=generator)
    with torch.no_grad():
        _, weights, indices = router(hidden)
        _, ours, picked = router_grouped_softmax(hidden, router.weight, 3, 4, 2, 16.0)
    order = indices.gather(1, weights.argsort(-1, descending=True))
    assert torch.equal(picked, order)
    torch.testing.assert_close(ours, weights.sort(-1, descending=True).values)


def test_presets_are_what_was_published() -> None:
    names = preset_names(FAMILY)
    assert {"deepseek-v2", "deepseek-v2-lite", "deepseek-v2.5"} <= set(names)
    lite, full, later = (preset(n).config() for n in ("deepseek-v2-lite", "deepseek-v2", "deepseek-v2.5"))
    assert (lite.q_lora_rank, lite.topk_method, lite.routed_scaling_factor) == (None, "greedy", 1.0)
    assert (full.q_lora_rank, full.topk_method, full.routed_scaling_factor) == (1536, "group_limited_greedy", 16.0)
    assert [c.rope_parameters["mscale"] for c in (full, later)] == [0.707, 1.0]


def test_generation_is_upstreams(pair: tuple[Any, Any]) -> None:
    original, ported = pair
    prompt = words(40)
    theirs = original.generate(prompt, max_new_tokens=64, do_sample=False)[0, 40:]
    ours = [step.tokens for step in generate(ported, prompt, 64)]
    assert torch.equal(torch.cat(ours), theirs)
    assert not [row for row in usage(ported) if row["fallbacks"]]


def test_replayed_decoding_is_in_use(pair: tuple[Any, Any]) -> None:
    ways = [(step.way, step.refusal) for step in generate(pair[1], words(9), 16)]
    assert ways[-1] == ("replayed", "")


def test_64_decode_steps_are_a_prefill(pair: tuple[Any, Any]) -> None:
    original, ported = pair
    tokens = words(100)
    with torch.inference_mode():
        wanted = original(tokens, use_cache=False).logits
        cache, logits = None, []
        for piece in tokens.split([36, *[1] * 64], dim=1):
            output = ported(piece, use_cache=True, cache=cache)
            cache = output.cache
            logits.append(output.logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), wanted, rtol=1e-3, atol=2e-3)


def test_long_text_in_chunks_and_left_padded(pair: tuple[Any, Any]) -> None:
    """1200 tokens: five times the length before YaRN."""
    original, ported = pair
    tokens = words(1200)
    with torch.inference_mode():
        wanted = original(tokens, use_cache=False).logits
        torch.testing.assert_close(ported(tokens, use_cache=False).logits, wanted, rtol=1e-3, atol=5e-3)
        cache, chunks = None, []
        for piece in tokens.split([500, 6, 600, 94], dim=1):
            output = ported(piece, use_cache=True, cache=cache)
            cache = output.cache
            chunks.append(output.logits)
        torch.testing.assert_close(torch.cat(chunks, dim=1), wanted, rtol=1e-3, atol=5e-3)
        padded = torch.cat((torch.full((1, 7), 258), tokens[:, :60]), dim=1)
        both = torch.cat((padded, words(67, start=5000)))
        mask = torch.ones_like(both)
        mask[0, :7] = 0
        ours, theirs = (m(both, attention_mask=mask, use_cache=False).logits for m in (ported, original))
    torch.testing.assert_close(ours[0, 7:], theirs[0, 7:], rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-3, atol=2e-3)


def test_checkpoint_round_trip_is_bit_equal(exported: Path) -> None:
    port = porter.adaptation.plan_port(NAME, "cpu", scheme="fp32")
    stored, written = (load_file(d / "model.safetensors") for d in (source_directory(), exported))
    back = port.layout.invert(port.correspondence.invert(written))
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], stored[name].float()) for name in stored)


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8"])
def test_int8_schemes_quantize_linears_and_experts(tmp_path: Path, scheme: str) -> None:
    porter.adapt(NAME, scheme=scheme, output=tmp_path / "port", strict=True)
    model = porter.load(tmp_path / "port", strict=True)
    layer = model.model.layers[1]
    assert layer.self_attn.q_proj.weight.dtype == layer.mlp.experts.down_proj.dtype == torch.int8
    assert layer.self_attn.kv_b_proj.weight.dtype == torch.bfloat16 and layer.mlp.gate.weight.dtype == torch.float32
    assert len(list(generate(model, words(12), 4))) == 4


def test_importable_class_loads_the_original() -> None:
    module = importlib.import_module("porter.models.deepseek_v2")
    model = module.DeepseekV2ForCausalLM.from_pretrained(source_directory(), dtype=torch.float32)
    with torch.inference_mode():
        assert model(words(8)).logits.isfinite().all()


def test_alignment_is_aligned_and_finds_a_planted_scale(exported: Path, tmp_path: Path) -> None:
    original: Any = AutoModelForCausalLM.from_pretrained(source_directory(), dtype=torch.float32)
    golden = porter.capture(original, words(24), path=str(tmp_path / "golden"), new_tokens=2)
    model = porter.load(exported)
    assert porter.align(golden, model).verdict == "aligned"
    model.model.layers[2].mlp.gate.routed_scaling_factor = 1.0
    report = porter.align(golden, model)
    assert report.verdict == "drift" and report.first_drift.module == "model.layers.2.mlp.gate"
    assert report.causes[0].kind == "router-scale"
