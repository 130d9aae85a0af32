"""DeepSeek-V3.2: sparse attention is proven and matched by structure; the shipped checkpoint decodes as upstream's."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DeepseekV32Config, DynamicCache, GlmMoeDsaConfig, StaticCache

import porter
from porter.generation import generate
from porter.kernels.dispatch import OpCall, usage
from porter.kv_cache import IndexedLayer, cache_for
from porter.models.family import families, family_of
from porter.models.port import port_source
from porter.models.presets import preset, preset_names, shipped_directory
from porter.models.proof import BOUND, relative_error
from porter.models.proof_parts import PARTS
from porter.models.shipped import train
from porter.models.shipped.indexer_alignment import IndexerAlignment, index_scores
from porter.models.shipped.recipes import RECIPES
from porter.plan import kv_bytes_per_token
from porter.precision import float64_mode

NAME = "tiny-deepseek-v32"
FAMILY = "deepseek_v32"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 8,
}
FACTOR = 4.0
"""A port in float32 may differ from upstream in float64 by this times what upstream in float32 itself differs."""


def source_directory() -> Path:
    found: Path | None = shipped_directory(NAME)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("v32") / "port"
    porter.adapt(NAME, scheme="fp32", output=directory, strict=True)
    return directory


@pytest.fixture(scope="module")
def pair(exported: Path) -> tuple[Any, Any]:
    original: Any = AutoModelForCausalLM.from_pretrained(source_directory(), dtype=torch.float32)
    return original.eval(), porter.load(exported, strict=True)


def words(count: int, start: int = 900) -> torch.Tensor:
    return torch.tensor([[256, *train.TEXT.read_bytes()[start : start + count - 1]]])


def fed(model: Any, ids: torch.Tensor, sizes: list[int], cache: Any = None) -> torch.Tensor:
    """Logits of `ids` given in pieces of `sizes` through one cache."""
    logits = []
    with torch.no_grad():
        for piece in ids.split(sizes, dim=1):
            output = model(piece, use_cache=True, cache=cache)
            cache = output.cache
            logits.append(output.logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize(
    "changes", [{}, {"attention_bias": True, "norm_topk_prob": False}, {"rope_parameters": YARN}, {"index_topk": 100}]
)
def test_float64_proof(changes: dict[str, Any]) -> None:
    family = families()[FAMILY]
    source = family.port(DeepseekV32Config(**changes))
    assert set(source.proof.errors) == set(PARTS) and max(source.proof.errors.values()) < BOUND
    variants = {c.candidate.rewrite: c.candidate.variant for c in source.classes}
    assert set(variants) == set(family.expected) and not source.near_misses
    assert (variants["indexer"], variants["sparse_mla_attention"]) == ("half rope", "interleaved rope")


def test_masks_are_made_only_where_causality_does_not_say_it_all(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of some chips take no mask. Of static caches the keys that are not there yet must be hidden."""
    original, ported = pair
    ids, masks = words(45), []
    plain_call = OpCall.__call__

    def noted(self: OpCall, *arguments: Any) -> Any:
        if self.name == "indexer":
            masks.append(arguments[3] is not None)
        return plain_call(self, *arguments)

    monkeypatch.setattr(OpCall, "__call__", noted)

    def masked(sizes: list[int], cache: Any) -> list[bool]:
        masks.clear()
        got, wanted = fed(ported, ids, sizes, cache), fed(original, ids, sizes)
        assert relative_error(got, wanted) < 1e-4
        layers = ported.config.num_hidden_layers
        return [any(masks[i : i + layers]) for i in range(0, len(masks), layers)]

    assert masked([43, 1, 1], cache_for(ported.config, 64)) == [False, False, False]
    assert masked([20, 24, 1], cache_for(ported.config, 64)) == [False, False, False]
    assert masked([45], DynamicCache(config=ported.config)) == [False]
    static = StaticCache(config=ported.config, max_cache_len=64)
    assert static.is_compileable
    assert masked([43, 1, 1], static) == [True, True, True]


def test_glm_moe_dsa_falls_out() -> None:
    """Interleaved rope in the indexer, and layers that take the selection of a layer before."""
    config = GlmMoeDsaConfig(num_hidden_layers=4, indexer_types=["full", "shared", "full", "shared"])
    source = family_of("glm_moe_dsa").port(config)
    variants = {c.candidate.rewrite: c.candidate.variant for c in source.classes}
    assert variants["indexer"] == "interleaved rope"
    assert variants["sparse_mla_attention"] == "interleaved rope, shared selection"
    assert variants["decoder_layer"] == "pre_norm, selection handed on"
    assert source.proof.passed and not source.near_misses


def test_an_indexer_is_ported_where_its_attention_is_not_and_the_reason_is_given() -> None:
    from transformers import AXK2Config

    source = family_of("axk2").port(AXK2Config())
    assert "indexer" in {c.candidate.rewrite for c in source.classes} and source.proof.passed
    assert "q_gate_proj" in source.near_misses["AXK2Attention"]
    assert '"allow_is_causal_skip": False' in source.text


@pytest.mark.parametrize(
    ("rewrite", "wrong"),
    [
        ("IndexerForward", "self.softmax_scale * self.n_heads**-0.5 -> -self.softmax_scale"),
        ("IndexerForward", "attention_mask, scaling -> None, scaling"),
        ("_SparseLatent", "selected, attention_mask, self.scaling -> selected.flip(1), attention_mask, self.scaling"),
    ],
)
def test_a_planted_mistake_is_refused(rewrite: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = wrong.split(" -> ")
    getsource = inspect.getsource

    def planted(function: Any) -> str:
        text: str = getsource(function)
        return text.replace(before, after) if getattr(function, "__qualname__", "").startswith(rewrite) else text

    monkeypatch.setattr(inspect, "getsource", planted)
    family = families()[FAMILY]
    source = port_source(DeepseekV32Config(rms_norm_eps=1.1e-6), family.module, family.class_name, "cpu")
    missing = set(family.expected) - {c.candidate.rewrite for c in source.classes}
    assert missing == {"indexer"} if rewrite == "IndexerForward" else missing == {"sparse_mla_attention"}


def test_presets_and_the_plan_count_the_indexers_keys() -> None:
    assert set(preset_names(FAMILY)) == {"deepseek-v3.2", "deepseek-v3.2-exp"}
    config = preset("deepseek-v3.2").config()
    assert (config.index_topk, config.index_n_heads, config.index_head_dim) == (2048, 64, 128)
    assert kv_bytes_per_token(config, 2) == 61 * (512 + 64 + 128) * 2
    per_layer = 61 * (1536 * 64 * 128 + 7168 * 128 + 2 * 128 + 7168 * 64)
    assert preset("deepseek-v3.2").published_parameters == preset("deepseek-v3").published_parameters + per_layer
    shared = GlmMoeDsaConfig(num_hidden_layers=4, indexer_types=["full", "shared", "full", "shared"])
    latents = 4 * (shared.kv_lora_rank + shared.qk_rope_head_dim)
    assert kv_bytes_per_token(shared, 2) == 2 * (latents + 2 * shared.index_head_dim)


def test_generation_is_upstreams_and_no_op_falls_back(pair: tuple[Any, Any]) -> None:
    original, ported = pair
    prompt = words(150)
    theirs = original.generate(prompt, max_new_tokens=64, do_sample=False)[0, 150:]
    steps = list(generate(ported, prompt, 64))
    assert torch.equal(torch.cat([step.tokens for step in steps]), theirs)
    assert steps[-1].way == "model" and "indexer" in steps[-1].refusal
    rows = usage(ported)
    assert not [row for row in rows if row["fallbacks"]]
    assert {"indexer", "sparse_mla_attention"} <= {row["op"] for row in rows if row["calls"]}


@pytest.mark.parametrize("length", [1200, pytest.param(4096, marks=pytest.mark.slow)])
def test_long_text_at_once_in_chunks_and_decoded(pair: tuple[Any, Any], length: int) -> None:
    """Selections of 32 of up to 4096 keys, eight times as far as yarn's original 512 positions; 64 decode steps."""
    original, ported = pair
    ids = words(length)
    with torch.no_grad():
        rounded = original(ids, use_cache=False).logits
        exact_model: Any = AutoModelForCausalLM.from_pretrained(
            source_directory(), dtype=torch.float32, experts_implementation="eager"
        )
        with float64_mode():
            exact = exact_model.double().eval()(ids, use_cache=False).logits
        floor = relative_error(rounded, exact)
        assert relative_error(ported(ids, use_cache=False).logits, exact) < FACTOR * floor
    sizes = [20, 1, 40, length - 125, *[1] * 64]
    assert relative_error(fed(ported, ids, sizes), exact) < FACTOR * floor
    assert relative_error(fed(ported, ids, sizes, cache_for(ported.config, length)), exact) < FACTOR * floor


def test_left_padded_batches(pair: tuple[Any, Any]) -> None:
    original, ported = pair
    both = torch.cat((torch.cat((torch.full((1, 57), 258), words(73)), dim=1), words(130, start=5000)))
    mask = torch.ones_like(both)
    mask[0, :57] = 0
    with torch.inference_mode():
        ours, theirs = (m(both, attention_mask=mask, use_cache=False).logits for m in (ported, original))
    torch.testing.assert_close(ours[0, 57:], theirs[0, 57:], rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-3, atol=2e-3)


def test_the_contiguous_cache_keeps_the_indexers_keys() -> None:
    layer = IndexedLayer(10)
    seen = []
    for count in (4, 1, 3):
        layer.update(torch.zeros(1, 1, count, 2), torch.zeros(1, 1, count, 3))
        seen.append(torch.full((1, count, 5), float(count)))
        assert torch.equal(layer.update_indexer(seen[-1]), torch.cat(seen, dim=1))
    layer.crop(-4)
    layer.update(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 3))
    assert layer.update_indexer(torch.ones(1, 2, 5))[0, :, 0].tolist() == [4.0] * 4 + [1.0] * 2
    assert all(isinstance(each, IndexedLayer) for each in cache_for(DeepseekV32Config(num_hidden_layers=2), 8).layers)


def test_checkpoint_round_trip_is_bit_equal(exported: Path) -> None:
    port = porter.adaptation.plan_port(NAME, "cpu", scheme="fp32")
    stored, written = (load_file(d / "model.safetensors") for d in (source_directory(), exported))
    back = port.layout.invert(port.correspondence.invert(written))
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], stored[name].float()) for name in stored)


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8"])
def test_int8_schemes_quantize_linears_and_experts_but_not_the_score_weights(tmp_path: Path, scheme: str) -> None:
    porter.adapt(NAME, scheme=scheme, output=tmp_path / "port", strict=True)
    model = porter.load(tmp_path / "port", strict=True)
    layer = model.model.layers[1]
    indexer = layer.self_attn.indexer
    assert {indexer.wq_b.weight.dtype, indexer.wk.weight.dtype, layer.mlp.experts.down_proj.dtype} == {torch.int8}
    assert indexer.weights_proj.weight.dtype == layer.self_attn.kv_b_proj.weight.dtype == torch.bfloat16
    assert len(list(generate(model, words(40), 4))) == 4


def test_importable_class_loads_the_original() -> None:
    module = importlib.import_module("porter.models.deepseek_v32")
    model = module.DeepseekV32ForCausalLM.from_pretrained(source_directory(), dtype=torch.float32)
    with torch.inference_mode():
        assert model(words(40)).logits.isfinite().all()


def test_alignment_is_aligned_and_finds_faults_of_the_indexer_by_name(exported: Path, tmp_path: Path) -> None:
    original: Any = AutoModelForCausalLM.from_pretrained(source_directory(), dtype=torch.float32)
    golden = porter.capture(original, words(80), path=str(tmp_path / "golden"), new_tokens=2)
    model = porter.load(exported)
    assert porter.align(golden, model).verdict == "aligned"
    indexer = model.model.layers[2].self_attn.indexer
    indexer.index_topk = 24
    report = porter.align(golden, model)
    assert report.verdict == "drift" and report.first_drift is not None
    assert report.first_drift.module == "model.layers.2.self_attn.indexer"
    assert "drift" not in {row.status for row in report.modules if row.module.endswith(".self_attn")}
    indexer.index_topk = 32
    model.model.layers[1].self_attn.rope = OpCall("rope", "half")
    report = porter.align(golden, model)
    assert report.first_drift is not None and report.first_drift.module == "model.layers.1.self_attn"


def test_indexers_were_trained_to_select_what_attention_attends_to(pair: tuple[Any, Any]) -> None:
    """32 of up to 512 keys hold most of the dense attention's weight, nearly as much as the best 32 would."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        source_directory(), dtype=torch.float32, attn_implementation="eager"
    )
    with IndexerAlignment(model) as alignment, torch.no_grad():
        alignment.begin(0.0)
        calls: dict[int, Any] = {}
        for index, attention in enumerate(alignment.attentions):
            indexer: Any = attention.indexer
            indexer.register_forward_pre_hook(lambda m, args, i=index: calls.update({i: args[:3]}))
            attention.register_forward_hook(lambda m, args, out, i=index: calls.update({i: (*calls[i], out[1])}))
        model(words(512), use_cache=False)
        assert float(alignment.loss()) < 4 * 1.0
        for index, attention in enumerate(alignment.attentions):
            hidden, residual, (cos, sin), attended = calls[index]
            visible = torch.ones(512, 512, dtype=torch.bool).tril()
            scores = index_scores(attention.indexer, hidden, residual, cos, sin)[0].masked_fill(~visible, -1e30)
            weights = attended.mean(1)[0]
            held, best = (weights.gather(1, by.topk(32).indices)[256:].sum(1).mean() for by in (scores, weights))
            assert held > 0.8 and held > 0.95 * best


def test_the_indexers_loss_reaches_the_indexers_alone() -> None:
    config = RECIPES[NAME]().config
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with IndexerAlignment(model) as alignment:
        for progress, selected in ((0.0, 1 << 30), (0.9, config.index_topk)):
            alignment.begin(progress)
            indexer: Any = alignment.attentions[0].indexer
            assert indexer.index_topk == selected
            model(words(60)[:, :60], use_cache=False)
            torch.autograd.backward(alignment.loss())
            reached = {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
            assert reached and all(".indexer." in name for name in reached)
            model.zero_grad()
    assert model.config._attn_implementation == "sdpa"


def test_a_cache_of_transformers_holds_the_indexers_keys(pair: tuple[Any, Any]) -> None:
    cache = DynamicCache(config=pair[1].config)
    fed(pair[1], words(50), [40, 10], cache)
    layer: Any = cache.layers[0]
    assert layer.indexer_keys.shape == (1, 50, 32)
