"""DeepSeek-V4: every kind of layer and router is proven; the shipped checkpoint decodes as upstream does."""

from __future__ import annotations

import importlib.util
import inspect
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DeepseekV4Config

import porter
from porter.adaptation import plan_port
from porter.compressed_keys import compressed_bytes_per_token, window_bytes
from porter.errors import PorterError
from porter.generation import generate
from porter.kernels.dispatch import usage
from porter.models.family import families, family_of
from porter.models.port import port_source
from porter.models.presets import shipped_directory
from porter.models.proof import BOUND
from porter.models.proof_parts import PARTS
from porter.models.rewrite import Mismatch
from porter.models.rewrites import compressor, hyper_connection, shared_kv_attention
from porter.models.rewrites.experts import StackedExperts
from porter.models.rewrites.gated_mlp import GatedMLP
from porter.models.rewrites.score_router import ScoreRouter

NAME = "tiny-deepseek-v4"
FAMILY = "deepseek_v4"
SLIDING, SELECTED, ALL = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8, "beta_fast": 32, "beta_slow": 1}


def source_directory() -> Path:
    found = shipped_directory(NAME)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("v4") / "port"
    porter.adapt(NAME, scheme="fp32", output=directory, strict=True)
    return directory


@pytest.fixture(scope="module")
def pair(exported: Path) -> tuple[Any, Any]:
    original: Any = AutoModelForCausalLM.from_pretrained(source_directory(), dtype=torch.float32)
    return original.eval(), porter.load(exported)


def words(count: int, start: int = 900) -> torch.Tensor:
    text = (Path(porter.models.__file__).parent / "shipped" / "text" / "persuasion.txt").read_bytes()
    return torch.tensor([[256, *text[start : start + count - 1]]])


def fed(model: Any, tokens: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    cache, logits = None, []
    with torch.inference_mode():
        for piece in tokens.split(sizes, dim=1):
            output = model(piece, use_cache=True, cache=cache)
            cache = output.cache
            logits.append(output.logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_types": [SLIDING, SELECTED, ALL] + [SELECTED] * 40, "rope_parameters": YARN},
        {"layer_types": [SLIDING] * 43, "mlp_layer_types": ["moe"] * 43, "mlp_bias": True, "hc_sinkhorn_iters": 1},
    ],
)
def test_float64_proof(changes: dict[str, Any]) -> None:
    family = families()[FAMILY]
    source = family.port(DeepseekV4Config(**changes))
    assert set(source.proof.errors) == set(PARTS) and max(source.proof.errors.values()) < BOUND
    variants = {c.name.removeprefix("DeepseekV4"): c.candidate.variant for c in source.classes}
    assert set(family.expected) <= {c.candidate.rewrite for c in source.classes} and not source.near_misses
    assert variants["Experts"] == "clamped" and variants["MLP"] == "gate_proj gates up_proj, clamped"
    assert variants["TopKRouter"] == "sqrtsoftplus" and variants.get("HashRouter", "hash") == "hash"
    compressed = {"Indexer": "indexer", "CSACompressor": "selected entries", "HCACompressor": "all entries"}
    assert {n: v for n, v in variants.items() if n in compressed} == ({} if "mlp_bias" in changes else compressed)


class _Limited(nn.Module):
    """A gated MLP with `limit` written in its code or under a name of its own."""

    def __init__(self, ceiling: float | None = None) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(6, 10, bias=False), nn.Linear(6, 10, bias=False)
        self.down_proj = nn.Linear(10, 6, bias=False)
        self.act_fn = nn.SiLU()
        if ceiling is not None:
            self.ceiling = ceiling

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        limit = getattr(self, "ceiling", 7.0)
        up = self.up_proj(x).clamp(-limit, limit)
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=limit)) * up)


@pytest.mark.parametrize("model_type", ["gpt_oss", "granite_swa"])
def test_other_models_with_sinks_are_carried(model_type: str) -> None:
    source = family_of(model_type).port(CONFIG_MAPPING[model_type]())
    variants = {c.candidate.rewrite: c.candidate.variant for c in source.classes}
    assert variants["sink_attention"] == "half rope, sinks" and max(source.proof.errors.values()) < BOUND


def test_a_limit_that_ordinary_inputs_do_not_reach_is_found_or_refused() -> None:
    found = GatedMLP().candidates(_Limited(5.0))
    assert isinstance(found, list) and [c.variant for c in found] == ["gate_proj gates up_proj, clamped"]
    assert found[0].rename["limit"] == "ceiling"
    hidden = GatedMLP().candidates(_Limited())
    assert isinstance(hidden, Mismatch) and "where this is large" in hidden.reason


def test_experts_with_an_unknown_limit_are_refused() -> None:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

    config = DeepseekV4Config(hidden_size=12, moe_intermediate_size=8, n_routed_experts=3)
    config._experts_implementation = "eager"
    experts = DeepseekV4Experts(config)
    nn.init.normal_(experts.gate_up_proj)
    nn.init.normal_(experts.down_proj)
    found = StackedExperts().candidates(experts)
    assert isinstance(found, list) and found[0].variant == "clamped"
    experts._apply_gate = lambda gate_up: gate_up.chunk(2, dim=-1)[0].tanh()
    assert isinstance(StackedExperts().candidates(experts), Mismatch)


def test_a_router_with_other_scores_is_a_near_miss() -> None:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter

    router = DeepseekV4TopKRouter(DeepseekV4Config(hidden_size=12, n_routed_experts=8, scoring_func="sigmoid"))
    found = ScoreRouter().candidates(router)
    assert isinstance(found, Mismatch) and "Sigmoid, not sqrt(softplus)" in found.reason


@pytest.mark.parametrize("fault", ["mixed the other way", "values not turned back", "entries too early", "no sinks"])
def test_a_wrong_rewrite_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer(hyper_connection.HyperLayerForward):
        def forward(self, hidden_states: Any, input_ids: Any = None, **kwargs: Any) -> Any:
            post, comb, collapsed = self.attn_hc(hidden_states)
            attention_output, _ = self.self_attn(self.input_layernorm(collapsed), **kwargs)
            hidden_states = self.expand(hidden_states, attention_output, post, comb.transpose(-1, -2))
            post, comb, collapsed = self.ffn_hc(hidden_states)
            mlp_output = self.mlp(self.post_attention_layernorm(collapsed), input_ids=input_ids)
            return self.expand(hidden_states, mlp_output, post, comb)

    name = {"mixed the other way": "DecoderLayer", "entries too early": "HCACompressor"}.get(fault, "Attention")
    if fault == "mixed the other way":
        monkeypatch.setattr(hyper_connection, "HyperLayerForward", Layer)
    else:
        module, kind, old, new = {
            "values not turned back": (shared_kv_attention, "SharedKVForward", "cos, -sin", "cos, sin"),
            "entries too early": (compressor, "AllEntriesForward", "(position_ids + 1)", "(position_ids + 2)"),
            "no sinks": (shared_kv_attention, "SharedKVForward", "self.sinks,", "self.sinks - 30.0,"),
        }[fault]
        monkeypatch.setattr(module, kind, _edited(module, kind, old, new))
    family = families()[FAMILY]
    source = port_source(DeepseekV4Config(), family.module, family.class_name, "cpu")
    assert f"DeepseekV4{name}" in source.near_misses
    assert "float64 proof gives relative error" in source.near_misses[f"DeepseekV4{name}"]


def _edited(module: Any, kind: str, old: str, new: str) -> type[nn.Module]:
    """The class `kind` with `old` in its text replaced."""
    text = inspect.getsource(module)
    assert text.count(old) >= 1
    path = Path(tempfile.mkdtemp()) / "edited.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("edited", path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["edited"] = loaded
    spec.loader.exec_module(loaded)
    found: type[nn.Module] = getattr(loaded, kind)
    return found


def test_generation_is_upstreams(pair: tuple[Any, Any]) -> None:
    """100 tokens of context: 25 selected entries of which 16 are read, and six that the last layer reads."""
    original, ported = pair
    prompt = words(100)
    theirs = original.generate(prompt, max_new_tokens=64, do_sample=False, eos_token_id=None)[0, 100:]
    steps = list(generate(ported, prompt, 64))
    assert torch.equal(torch.cat([step.tokens for step in steps]), theirs)
    assert not [row for row in usage(ported) if row["fallbacks"]]
    assert steps[-1].way == "model" and "an indexer selects" in steps[-1].refusal


def test_64_decode_steps_are_a_prefill(pair: tuple[Any, Any]) -> None:
    original, ported = pair
    tokens = words(100)
    with torch.inference_mode():
        wanted = original(tokens, use_cache=False).logits
    torch.testing.assert_close(fed(ported, tokens, [36, *[1] * 64]), wanted, rtol=1e-3, atol=2e-3)


def test_long_text_in_chunks_and_left_padded(pair: tuple[Any, Any]) -> None:
    """1300 tokens: past the length before YaRN; pieces end within windows of 4 and of 16."""
    original, ported = pair
    tokens = words(1300)
    with torch.inference_mode():
        wanted = original(tokens, use_cache=False).logits
        torch.testing.assert_close(ported(tokens, use_cache=False).logits, wanted, rtol=1e-3, atol=5e-3)
        torch.testing.assert_close(fed(ported, tokens, [501, 1, 6, 700, 92]), wanted, rtol=1e-3, atol=5e-3)
        padded = torch.cat((torch.full((1, 7), 258), tokens[:, :90]), dim=1)
        both = torch.cat((padded, words(97, start=5000)))
        mask = torch.ones_like(both)
        mask[0, :7] = 0
        ours, theirs = (m(both, attention_mask=mask, use_cache=False).logits for m in (ported, original))
    torch.testing.assert_close(ours[0, 7:], theirs[0, 7:], rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-3, atol=2e-3)


def test_checkpoint_round_trip_is_bit_equal(exported: Path) -> None:
    port = plan_port(NAME, "cpu", scheme="fp32")
    stored, written = (load_file(d / "model.safetensors") for d in (source_directory(), exported))
    back = port.layout.invert(port.correspondence.invert(written))
    assert back.keys() == stored.keys() and "model.layers.0.attn.wkv.weight" in stored
    assert all(torch.equal(back[name], stored[name].to(back[name].dtype)) for name in stored)
    assert back["model.layers.0.ffn.gate.tid2eid"].dtype == torch.int64


@pytest.mark.parametrize("expert", [-1, 99])
def test_a_table_that_names_unknown_experts_is_refused(tmp_path: Path, expert: int) -> None:
    checkpoint = shutil.copytree(source_directory(), tmp_path / "checkpoint")
    state = load_file(checkpoint / "model.safetensors")
    name = "model.layers.0.ffn.gate.tid2eid"
    state[name].view(-1)[5] = expert
    save_file(state, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(PorterError, match=f"tensor {name} names experts from .*; the router has 8"):
        porter.adapt(checkpoint, output=tmp_path / "port")
    assert not (tmp_path / "port").exists()


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8", "bf16"])
def test_schemes(tmp_path: Path, scheme: str) -> None:
    porter.adapt(NAME, scheme=scheme, output=tmp_path / "port", strict=True)
    model = porter.load(tmp_path / "port", strict=True)
    layer = model.model.layers[1]
    low = torch.bfloat16 if scheme == "bf16" else torch.int8
    assert layer.self_attn.q_b_proj.weight.dtype == layer.mlp.experts.down_proj.dtype == low
    assert layer.self_attn.compressor.kv_proj.weight.dtype == torch.bfloat16
    assert layer.self_attn.sinks.dtype == layer.attn_hc.fn.dtype == layer.input_layernorm.weight.dtype == torch.float32
    assert layer.mlp.experts.experts.variant == ("clamped" if scheme == "bf16" else f"clamped_{scheme}")
    assert len(list(generate(model, words(70), 4))) == 4
    assert not [row for row in usage(model) if row["fallbacks"]]


def test_memory_is_counted_as_upstreams_cache_holds_it(pair: tuple[Any, Any]) -> None:
    original, _ = pair
    held = {}
    for length in (128, 640):
        with torch.inference_mode():
            cache = original(words(length), use_cache=True).cache
        held[length] = sum(_bytes(vars(layer)) for layer in cache.layers) - sum(
            layer.values.numel() * 4 for layer in cache.layers if layer.values is layer.keys
        )
    grown = held[640] - held[128]
    assert grown == 512 * compressed_bytes_per_token(original.config, 4)
    assert held[128] - 128 * compressed_bytes_per_token(original.config, 4) <= 2 * window_bytes(original.config, 4)


def _bytes(values: Any) -> int:
    if isinstance(values, torch.Tensor):
        return values.numel() * values.element_size()
    return sum(_bytes(v) for v in values.values()) if isinstance(values, dict) else 0


@pytest.mark.parametrize(
    ("module", "fault"),
    [
        ("model.layers.1.self_attn.compressor.indexer", lambda m: setattr(m, "index_topk", 7)),
        ("model.layers.2.self_attn.compressor", lambda m: m.position_bias.data.mul_(-1)),
        ("model.layers.1.attn_hc", lambda m: setattr(m, "hc_sinkhorn_iters", 1)),
        ("model.layers.0.mlp.gate", lambda m: m.tid2eid.copy_(m.tid2eid.roll(1, 0))),
    ],
    ids=["indexer", "compressor", "hyper-connection", "hash table"],
)
def test_a_planted_fault_is_found_by_name(
    exported: Path, golden: Any, module: str, fault: Any
) -> None:
    model = porter.load(exported)
    with torch.no_grad():
        fault(model.get_submodule(module))
    report = porter.align(golden, model)
    assert report.verdict == "drift" and report.first_drift.module == module


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Any:
    original: Any = AutoModelForCausalLM.from_pretrained(source_directory(), dtype=torch.float32)
    return porter.capture(original, words(80), path=str(tmp_path_factory.mktemp("golden") / "golden"), new_tokens=2)


def test_int8_activations_of_clamped_experts_cost_what_they_must(golden: Any, tmp_path: Path) -> None:
    porter.adapt(NAME, scheme="w8a8", output=tmp_path / "port")
    assert porter.align(golden, tmp_path / "port").verdict == "aligned"


def test_the_port_is_aligned(exported: Path, golden: Any) -> None:
    assert porter.align(golden, porter.load(exported)).verdict == "aligned"
