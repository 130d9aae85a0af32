"""Qwen2-MoE and Qwen3-MoE: routers, dense layers and shared expert, from proof to a fault that is found by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache

import porter
from porter.generation import generate
from porter.golden.capture import capture
from porter.models.family import families
from porter.models.presets import preset, shipped_directory
from porter.models.proof_parts import PARTS
from porter.models.reduce import reduced_config
from porter.plan import experts_read

TINY = "tiny-qwen3-moe"
IDS = torch.tensor([list(b"Anne hoped she had outlived the age of blushing; but")])
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen2_moe", {}),
    ("qwen2_moe", {"norm_topk_prob": True, "qkv_bias": False}),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ("qwen2_moe", {"mlp_only_layers": [0]}),
    ("qwen3_moe", {"norm_topk_prob": True}),
    ("qwen3_moe", {"mlp_only_layers": [1, 5]}),
    ("qwen3_moe", {"decoder_sparse_step": 4}),
    ("qwen3_moe", {"attention_bias": True, "rope_parameters": YARN}),
]


@pytest.mark.parametrize(("model_type", "changes"), VARIANTS)
def test_float64_proof(model_type: str, changes: dict[str, Any]) -> None:
    family = families()[model_type]
    source = family.port(CONFIG_MAPPING[model_type](**changes))
    assert source.proof.passed and set(source.proof.errors) == set(PARTS) and not source.near_misses
    assert {c.candidate.rewrite for c in source.classes} >= set(family.expected)
    dense = "mlp_only_layers" in changes or "decoder_sparse_step" in changes
    assert ("gated_mlp" in {c.candidate.rewrite for c in source.classes}) == (dense or model_type == "qwen2_moe")


def test_layers_without_experts_survive_the_reduction() -> None:
    config = CONFIG_MAPPING["qwen3_moe"](decoder_sparse_step=4)
    assert reduced_config(config).num_hidden_layers == 4
    config = CONFIG_MAPPING["qwen3_moe"](mlp_only_layers=[1, 5])
    small = reduced_config(config)
    assert small.num_hidden_layers == 3 and 0 < len(small.mlp_only_layers) < 3


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("qwen3-30b-a3b", (8, 128)),
        ("qwen3-coder-480b-a35b", (8, 160)),
        ("qwen1.5-moe-a2.7b", (4, 60)),
        ("deepseek-v3", (8, 256)),
        ("qwen3-8b", (1, 1)),
    ],
)
def test_the_plan_counts_routed_experts_under_every_name(name: str, chosen: tuple[int, int]) -> None:
    assert experts_read(preset(name).config()) == chosen


def test_experts_under_other_names_and_per_layer() -> None:
    assert experts_read(CONFIG_MAPPING["mixtral"]()) == (2, 8)
    hunyuan = CONFIG_MAPPING["hunyuan_v1_moe"](head_dim=128, num_experts=64, moe_topk=[8, 4])
    assert experts_read(hunyuan) == (8, 64)


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22), ("qwen2-57b-a14b", 14)]
)
def test_what_a_token_reads_is_what_the_card_calls_activated(name: str, billions: float) -> None:
    plan = porter.adapt(name, plan=True).plan
    config = preset(name).config()
    embedding = config.vocab_size * config.hidden_size
    assert (plan.bytes_read_per_token / 2 + embedding) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.fixture(scope="module")
def original() -> Any:
    return AutoModelForCausalLM.from_pretrained(shipped_directory(TINY), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("moe") / "port"
    porter.adapt(TINY, scheme="fp32", strict=True, output=directory)
    return directory


def test_64_greedy_tokens_are_transformers_own(original: Any, exported: Path) -> None:
    ours = [int(step.tokens[0]) for step in generate(porter.load(exported, strict=True), IDS, 64)]
    theirs = original.generate(IDS, max_new_tokens=64, min_new_tokens=64, do_sample=False)[0, IDS.shape[1] :]
    assert ours == theirs.tolist()


def test_a_thousand_tokens_at_once_and_in_chunks(original: Any, exported: Path) -> None:
    ids = torch.randint(0, 256, (1, 1021), generator=torch.Generator().manual_seed(5))
    model = porter.load(exported)
    with torch.no_grad():
        whole, wanted = model(ids).logits, original(ids).logits
        cache, pieces = DynamicCache(config=model.config), []
        for piece in ids.split([7, 500, 1, 513], dim=1):
            pieces.append(model(piece, cache=cache, use_cache=True).logits)
    chunked = torch.cat(pieces, dim=1)
    # Float32 sums of some hundred terms: errors near 1e-6; a wrong position or mask is off by 1e-2.
    assert float((whole - wanted).norm() / wanted.norm()) < 2e-5
    assert float((chunked - whole).norm() / whole.norm()) < 2e-5


def test_it_is_aligned_and_a_fault_in_a_router_is_found_by_name(original: Any, exported: Path, tmp_path: Path) -> None:
    golden = tmp_path / "golden"
    capture(original, IDS, golden, new_tokens=3)
    assert porter.align(golden, exported).verdict == "aligned"
    faulty: Any = porter.load(exported)
    faulty.model.layers[1].mlp.gate.norm_topk_prob = False
    report = porter.align(golden, faulty)
    assert report.verdict == "drift" and report.first_drift is not None
    assert report.first_drift.module.startswith("model.layers.1.mlp")


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8"])
def test_experts_are_quantized_and_routers_are_not(scheme: str, tmp_path: Path) -> None:
    porter.adapt(TINY, scheme=scheme, strict=True, output=tmp_path / "port")
    state = porter.load(tmp_path / "port").state_dict()
    for layer in range(3):
        place = f"model.layers.{layer}"
        assert state[f"{place}.mlp.experts.gate_up_proj"].dtype == torch.int8
        assert state[f"{place}.self_attn.qkv_proj.weight"].dtype == torch.int8
        assert state[f"{place}.mlp.gate.weight"].dtype == torch.bfloat16
