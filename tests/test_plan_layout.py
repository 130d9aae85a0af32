"""One card's share of a model: every figure here is worked out from the published widths."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from porter.errors import PorterError
from porter.models.family import family_of
from porter.models.presets import preset
from porter.parallel_layout import Held, Layout, checked_layout, experts_of, held, kind_of, local_model, undividable


def shares(name: str, layout: Layout) -> dict[str, Held]:
    config = preset(name).config()
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    config.porter = {}
    model_class = family_of(config.model_type).port(config, "ascend-910b").model_class()
    whole, mine = (local_model(model_class, copy.deepcopy(config), each) for each in (Layout(1, 1), layout))
    return {row.name.removeprefix("model.layers.*."): row for row in held(whole, mine)}


def test_deepseek_v3_on_sixteen_cards() -> None:
    rows = shares("deepseek-v3", Layout(4, 16))
    shapes = {name: row.local for name, row in rows.items()}
    assert shapes["self_attn.q_b_proj.weight"] == (128 // 4 * 192, 1536)
    assert shapes["self_attn.kv_b_proj.weight"] == (128 // 4 * 256, 512)
    assert shapes["self_attn.o_proj.weight"] == (7168, 128 // 4 * 128)
    assert shapes["self_attn.q_a_proj.weight"] == (1536, 7168)
    assert shapes["mlp.experts.gate_up_proj"] == (16, 4096, 7168)
    assert shapes["mlp.experts.down_proj"] == (16, 7168, 2048)
    assert shapes["mlp.shared_experts.gate_up_proj.weight"] == (2 * 2048 // 4, 7168)
    assert shapes["mlp.gate.weight"] == (256, 7168)
    assert rows["mlp.gate_up_proj.weight"].layers == 3 and rows["mlp.experts.down_proj"].layers == 58
    assert rows["self_attn.o_proj.weight"].split == "dim 1: 16384 -> 4096"
    assert rows["self_attn.q_a_proj.weight"].split == "whole"


def test_kv_heads_are_replicated_where_they_are_fewer_than_cards() -> None:
    rows = shares("qwen3-235b-a22b", Layout(8, 8))
    assert rows["self_attn.qkv_proj.weight"].local == ((64 // 8 + 2 * 1) * 128, 4096)
    assert rows["mlp.experts.gate_up_proj"].local == (16, 3072, 4096)


def test_experts_without_groups_are_divided_in_width() -> None:
    rows = shares("qwen3-235b-a22b", Layout(4, 2))
    assert rows["mlp.experts.gate_up_proj"].local == (64, 2 * 1536 // 2, 4096)
    assert rows["mlp.experts.down_proj"].local == (64, 4096, 1536 // 2)


def test_linear_attention_divides_its_heads() -> None:
    rows = shares("qwen3-next-80b-a3b", Layout(4, 4))
    # 16 key heads with 2 value heads each: query, key, 2 values and 2 gates of 128 rows a key head.
    assert rows["linear_attn.in_proj_qkvz.weight"].local == (16 // 4 * 6 * 128, 2048)
    assert rows["linear_attn.conv1d.weight"].local == (16 // 4 * 4 * 128, 1, 4)
    assert rows["linear_attn.A_log"].local == (8,)


@pytest.mark.parametrize("name", ["deepseek-v3.2", "qwen3-32b", "qwen3-next-80b-a3b"])
def test_what_is_divided_adds_up(name: str) -> None:
    layout = Layout(2, 2 if experts_of(preset(name).config()) else 1)
    for row in shares(name, layout).values():
        parts = [w / n for w, n in zip(row.whole, row.local, strict=True)]
        assert sorted(parts)[-1] in (1.0, 2.0) and sorted(parts)[:-1] == [1.0] * (len(parts) - 1), row


@pytest.mark.parametrize(
    ("name", "layout", "says"),
    [
        ("qwen3-32b", Layout(3, 1), "num_attention_heads 64 / TP 3"),
        ("deepseek-v3", Layout(1, 48), "256 experts / EP 48"),
        ("qwen3-235b-a22b", Layout(1024, 1), "num_attention_heads 64 / TP 1024"),
        ("qwen3-next-80b-a3b", Layout(32, 32), "linear_num_key_heads 16 / TP 32"),
    ],
)
def test_what_does_not_divide_is_named(name: str, layout: Layout, says: str) -> None:
    assert says in undividable(preset(name).config(), layout)
    assert undividable(preset(name).config(), Layout(1, 1)) == []


@pytest.mark.parametrize(
    ("name", "tp", "ep", "says"),
    [
        ("deepseek-v3", 0, 1, "at least 1"),
        ("deepseek-v3", 6, 4, "multiple of the smaller"),
        ("qwen3-32b", 4, 4, "has no routed experts"),
    ],
)
def test_sizes_that_contradict_each_other(name: str, tp: int, ep: int, says: str) -> None:
    with pytest.raises(PorterError, match=says) as caught:
        checked_layout(preset(name).config(), tp, ep)
    assert caught.value.exit_code == 2


def test_groups_of_cards() -> None:
    attention, experts = Layout(4, 16), Layout(8, 2)
    assert (attention.cards, attention.dp, attention.expert_tp) == (16, 4, 1)
    assert (experts.cards, experts.dp, experts.expert_tp) == (8, 1, 4)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.3.mlp.experts.down_proj", "routed experts"),
        ("model.layers.3.mlp.shared_experts.down_proj.weight", "shared experts"),
        ("model.layers.3.mlp.shared_expert_gate.weight", "shared experts"),
        ("model.layers.3.self_attn.q_a_layernorm.weight", "norms"),
        ("model.layers.3.self_attn.indexer.k_norm.bias", "indexer"),
        ("model.layers.3.linear_attn.norm.weight", "linear attention"),
        ("model.layers.0.mlp.down_proj.weight", "dense mlp"),
        ("model.projector.weight", "other"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_model_of_a_given_head_size_keeps_it() -> None:
    config: Any = preset("qwen2.5-7b").config()
    config.porter = {}
    model_class = family_of(config.model_type).port(config, "ascend-910b").model_class()
    local = local_model(model_class, config, Layout(2, 1))
    sizes = {name: tuple(p.shape) for name, p in local.named_parameters()}
    assert sizes["model.layers.0.self_attn.qkv_proj.weight"] == ((28 // 2 + 2 * 4 // 2) * 128, 3584)
    assert sizes["model.layers.0.self_attn.qkv_proj.bias"] == ((28 // 2 + 2 * 4 // 2) * 128,)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("deepseek-v3", {"first_k_dense_replace": 61}),
        ("qwen3-30b-a3b", {"mlp_only_layers": list(range(48))}),
        ("qwen3-30b-a3b", {"decoder_sparse_step": 49}),
    ],
)
def test_a_model_whose_layers_are_all_dense_has_no_experts(name: str, fields: dict[str, object]) -> None:
    config = preset(name).config()
    assert experts_of(config) > 0
    for field, value in fields.items():
        setattr(config, field, value)
    assert experts_of(config) == 0
