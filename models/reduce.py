"""A model of the same structure at reduced width, small enough to prove in float64 on a laptop."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from porter.models.reduce_vision import has_vision, reduced_sections, reduced_vision

# Widths are mutually prime where they may be, so that a mixed-up dimension cannot fit by luck.
REDUCED = {
    "hidden_size": 48,
    "intermediate_size": 52,
    "moe_intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "q_lora_rank": 28,
    "kv_lora_rank": 36,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "shared_expert_intermediate_size": 28,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "vocab_size": 61,
    "sliding_window": 5,
    "num_nextn_predict_layers": 0,
    "index_n_heads": 3,
    "index_head_dim": 10,
    "index_topk": 5,
    "o_lora_rank": 10,
    "o_groups": 2,
    "hc_mult": 3,
    "linear_head_dim": 6,
    "linear_num_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "indexer_n_heads": 3,
    "indexer_head_dim": 10,
    "hc_count": 3,
    "hc_lowrank": 7,
    "ple_embed_dim": 24,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 31,
    "make_ngram_vocab_size_divisible_by": 4,
}
REDUCED_OTHERS = {
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3},
    "swiglu_limit": 0.75,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}
"""What is no width, but so large in released models that a short run would not meet it."""
OTHER_NAMES = {
    "hidden_size": ("dim", "d_model", "n_embd", "model_dim", "embed_dim"),
    "intermediate_size": ("ffn_dim", "hidden_dim", "n_inner", "d_ff", "ffn_hidden_size", "mlp_dim"),
    "num_hidden_layers": ("n_layers", "n_layer", "num_layers", "depth"),
    "num_attention_heads": ("n_heads", "n_head", "num_heads"),
    "num_key_value_heads": ("n_kv_heads", "num_kv_heads", "num_query_groups"),
    "num_experts_per_tok": ("moe_topk", "num_experts_per_token"),
    "vocab_size": ("n_vocab", "vocabulary_size", "padded_vocab_size"),
    "n_group": ("num_expert_group",),
}
"""What configs of checkpoints with their own code call these widths."""
NEEDED = ("num_experts_per_tok",)
"""Fields that DeepseekV2Config leaves at None, though no model runs without them."""
LEAST_LAYERS = 3
TOKEN_FIELDS = ("pad_token_id", "bos_token_id", "eos_token_id")
LAYER_LISTS = {"mlp_only_layers": 0, "ple_layer_ids": 1}
"""Lists of the layers that have something, and the number of the first layer there."""


def reduced_config(config: Any) -> Any:
    """`config` with every width in `REDUCED` that it has; rope, biases, activations and switches stay as they are."""
    if has_vision(config):
        return _with_vision(config)
    data = copy.deepcopy(config.to_dict())
    names = {name: _names(data, config, name) for name in (*REDUCED, "num_hidden_layers")}
    for name, value in REDUCED.items():
        for own in names[name]:
            if (data[own] is None and name in NEEDED) or _is_count(data[own]):
                data[own] = value
            elif isinstance(data[own], list) and data[own] and all(_is_count(each) for each in data[own]):
                data[own] = [value] * len(data[own])
    _limit_groups(data, config)
    data.update({name: value for name, value in REDUCED_OTHERS.items() if data.get(name) is not None})
    _turn_whole_pairs(data)
    if data.get("num_key_value_heads") == REDUCED["num_key_value_heads"] and "kv_lora_rank" in data:
        data["num_key_value_heads"] = data["num_attention_heads"]
    data.update(_sampled_layers(config.to_dict(), names["num_hidden_layers"]))
    derived = ("head_dim", "qk_head_dim") if "kv_lora_rank" in data else ()
    for name in (*TOKEN_FIELDS, "quantization_config", "porter", *derived):
        data.pop(name, None)
    if data.get("ple_layer_ids"):
        data["eos_token_id"] = data["vocab_size"] - 1  # what was before it is not looked at: it means something here
    reduced_sections(data)
    if data.get("max_window_layers", 0) is None:
        del data["max_window_layers"]
    reduced = config.__class__.from_dict(data)
    _forget_tokens(reduced)
    # torch's grouped matrix product, transformers' default for experts, has no float64.
    reduced._experts_implementation = "eager"
    return reduced


def _with_vision(config: Any) -> Any:
    text = reduced_config(config.text_config)
    reduced = config.__class__.from_dict(reduced_vision(config, text))
    _forget_tokens(reduced)
    _forget_tokens(reduced.text_config)
    reduced._experts_implementation = reduced.text_config._experts_implementation = "eager"
    return reduced


def _forget_tokens(config: Any) -> None:
    """No token is special at reduced width, but the end of a text to embeddings of several tokens together."""
    for name in TOKEN_FIELDS:
        if name != "eos_token_id" or not getattr(config, "ple_layer_ids", None):
            setattr(config, name, None)


def _names(data: dict[str, Any], config: Any, name: str) -> list[str]:
    """The keys of `data` that mean the width `name`: its own, the config's alias for it, and common other names."""
    alias = getattr(config, "attribute_map", {}).get(name)
    return [own for own in (name, alias, *OTHER_NAMES.get(name, ())) if own in data]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _turn_whole_pairs(data: dict[str, Any]) -> None:
    """Of several kinds of rotary positions each turns `REDUCED`'s share of a head: odd numbers make no whole pairs."""
    kinds = [value for value in (data.get("rope_parameters") or {}).values() if isinstance(value, dict)]
    share = REDUCED["qk_rope_head_dim"] / REDUCED["head_dim"]
    for kind in [*kinds, data] if kinds else []:
        if kind.get("partial_rotary_factor") is not None:
            kind["partial_rotary_factor"] = share


def _limit_groups(data: dict[str, Any], config: Any) -> None:
    """A router without groups stays one: of `REDUCED`'s groups some would be left without experts to choose."""
    for name in ("n_group", "topk_group"):
        if getattr(config, name, None) == 1:
            data.update(dict.fromkeys(_names(data, config, name), 1))


def _sampled_layers(data: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The number of layers under each of `names`, and the lists with an entry per layer, for so few layers that every
    kind appears."""
    if not names:
        return {}
    layers = data[names[0]]
    lists = {n: v for n, v in data.items() if isinstance(v, list | tuple) and len(v) == layers and n.endswith("_types")}
    for name, first in LAYER_LISTS.items():
        if isinstance(having := data.get(name), list) and having:
            lists[name] = [i + first in having for i in range(layers)]
    kinds = list(zip(*lists.values(), strict=True))
    chosen = list(dict.fromkeys(kinds))
    # Every so many layers one has experts: as many layers as it takes to have one of them.
    least = max(LEAST_LAYERS, data.get("decoder_sparse_step") or 1)
    sampled = (chosen + kinds * least)[: max(least, len(chosen))] or [()] * least
    result: dict[str, Any] = {name: [kind[i] for kind in sampled] for i, name in enumerate(lists)}
    for name, first in LAYER_LISTS.items():
        if name in result:
            result[name] = [i for i, has in enumerate(result[name], first) if has]
    if "max_window_layers" in data and "layer_types" in lists:
        result["max_window_layers"] = None
    return {**result, **dict.fromkeys(names, len(sampled))}


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter and persistent buffer values under which each of them matters to the output.

    Fresh models have unit norms, zero biases and near-uniform attention, under which many wrong ports look right.
    """
    generator = torch.Generator().manual_seed(seed)
    fill_hash_tables(model, generator)
    tensors = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n in model.state_dict()}}
    with torch.no_grad():
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():
                continue
            values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            if tensor.dim() == 1:
                centre = 1.0 if name.endswith("weight") else 0.0
                tensor.copy_((centre + 0.3 * values).to(tensor.dtype))
            else:
                tensor.copy_((values * 1.5 * tensor.shape[-1] ** -0.5).to(tensor.dtype))
    return model


def fill_hash_tables(model: nn.Module, generator: torch.Generator) -> None:
    """Give every table of experts by token id (a 2-D integer buffer beside `num_experts`) distinct experts per token.

    Fresh models send every token to expert 0, several times over.
    """
    for module in model.modules():
        experts = getattr(module, "num_experts", None)
        for table in module.buffers(recurse=False):
            if isinstance(experts, int) and table.dim() == 2 and not table.is_floating_point():
                scores = torch.rand(table.shape[0], experts, generator=generator)
                table.copy_(scores.topk(table.shape[1], dim=-1).indices)
