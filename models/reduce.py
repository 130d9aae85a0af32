"""A model of the same structure at reduced width, small enough to prove in float64 on a laptop."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

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
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "vocab_size": 61,
    "sliding_window": 5,
    "num_nextn_predict_layers": 0,
}
TOKEN_FIELDS = ("pad_token_id", "bos_token_id", "eos_token_id")


def reduced_config(config: Any) -> Any:
    """`config` with every width in `REDUCED` that it has; rope, biases, activations and switches stay as they are."""
    data = copy.deepcopy(config.to_dict())
    for name, value in REDUCED.items():
        if isinstance(data.get(name), int) and not isinstance(data[name], bool):
            data[name] = value
    if data.get("num_key_value_heads") == REDUCED["num_key_value_heads"] and "kv_lora_rank" in data:
        data["num_key_value_heads"] = data["num_attention_heads"]
    if data.get("layer_types"):
        data["layer_types"] = _sample_layer_types(data["layer_types"], data["num_hidden_layers"])
        data.pop("max_window_layers", None)
    derived = ("head_dim", "qk_head_dim") if "kv_lora_rank" in data else ()
    for name in (*TOKEN_FIELDS, "quantization_config", "porter", *derived):
        data.pop(name, None)
    reduced = config.__class__.from_dict(data)
    for name in TOKEN_FIELDS:
        setattr(reduced, name, None)
    # torch's grouped matrix product, transformers' default for experts, has no float64.
    reduced._experts_implementation = "eager"
    return reduced


def _sample_layer_types(types: list[str], count: int) -> list[str]:
    """`count` layer types in which every kind of the model appears."""
    kinds = list(dict.fromkeys(types))
    return (kinds + types * count)[:count]


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter and persistent buffer values under which each of them matters to the output.

    Fresh models have unit norms, zero biases and near-uniform attention, under which many wrong ports look right.
    """
    generator = torch.Generator().manual_seed(seed)
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
