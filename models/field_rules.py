"""What each field of a config.json must be, judged in the file itself before anything is built from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from porter.checkpoint.strict_json import shown
from porter.errors import PorterError
from porter.models.vision_rules import NESTED, vision_sizes

SIZE_LIMIT = 2**31 - 1
"""The largest size that 32-bit kernel arguments hold."""

PREDICTION_LAYERS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")
"""What configs call the number of prediction layers: transformers, DeepSeek, Qwen3.5."""

MOST = {
    "num_hidden_layers": 4096,
    "n_routed_experts": 65_536,
    "num_experts": 65_536,
    "num_local_experts": 65_536,
    **dict.fromkeys(PREDICTION_LAYERS, 64),
    "hc_sinkhorn_iters": 65_536,
}
"""Counts of modules or names that are built one by one, and of turns that are computed so; far above any model."""

POSITIVE = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "num_experts_per_tok",
    "decoder_sparse_step",
    "linear_conv_kernel_dim",
    "index_topk",
    "index_n_heads",
    "index_head_dim",
    "hc_mult",
    "hc_sinkhorn_iters",
    "o_groups",
    "o_lora_rank",
)
POSITIVE_OR_NULL = (
    "num_key_value_heads",
    "head_dim",
    "q_lora_rank",
    "sliding_window",
    "n_group",
    "topk_group",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
NOT_NEGATIVE = (
    "first_k_dense_replace",
    "n_shared_experts",
    "max_window_layers",
    "num_experts",
    "num_local_experts",
    "shared_expert_intermediate_size",
)
"""A Qwen3-MoE of no experts is dense, and Qwen3-Coder states a shared expert of width 0."""
NOT_NEGATIVE_OR_NULL = PREDICTION_LAYERS
INTEGERS = (
    (POSITIVE, 1, False),
    (POSITIVE_OR_NULL, 1, True),
    (NOT_NEGATIVE, 0, False),
    (NOT_NEGATIVE_OR_NULL, 0, True),
)
"""Names, the least value, and whether null stands for none."""
PER_LAYER = ("num_experts", "num_local_experts")
"""Fields that may also be a list with a value for each layer (Hunyuan)."""
SWITCHES = ("attention_bias", "tie_word_embeddings", "use_cache", "norm_topk_prob", "use_sliding_window")
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
FRACTIONS = {
    "rms_norm_eps": (0.0, 1.0),
    "rope_theta": (0.0, math.inf),
    "routed_scaling_factor": (0.0, math.inf),
    "attention_dropout": (0.0, 1.0),
    "initializer_range": (0.0, math.inf),
    "hc_eps": (0.0, 1.0),
    "swiglu_limit": (1e-6, math.inf),
}
"""Numbers with the bounds that they may not pass; infinity and NaN are never right."""

GENERATION = ("temperature", "top_p", "top_k", "repetition_penalty", "max_length", "max_new_tokens", "min_p")
"""Numbers of a generation_config.json, or null."""


def check_fields(fields: Mapping[str, Any], where: str) -> None:
    """Raise PorterError naming `where`, the field and what it must be for a value of the wrong type or range."""
    for names, low, nullable in INTEGERS:
        for name in names:
            if name in fields and not (nullable and fields[name] is None):
                values = fields[name] if name in PER_LAYER and isinstance(fields[name], list) else [fields[name]]
                # Qwen2MoeConfig writes a window of 0 where none is used.
                unused = name == "sliding_window" and fields.get("use_sliding_window") is False
                for value in values:
                    _check_integer(value, name, 0 if unused else low, MOST.get(name, SIZE_LIMIT), where)
    if fields.get("kv_lora_rank") is not None and fields.get("head_dim", 0) is None:
        raise wrong_field(where, "head_dim", None, "qk_rope_head_dim, or be left out")
    for name in SWITCHES:
        if not isinstance(fields.get(name, False), bool):
            raise wrong_field(where, name, fields[name], "true or false")
    for name, (least, most) in FRACTIONS.items():
        if name in fields and not is_number(fields[name], least, most):
            raise wrong_field(where, name, fields[name], f"a number from {least:g} to {most:g}")
    for name in GENERATION:
        if fields.get(name) is not None and not is_number(fields[name], 0.0, math.inf):
            raise wrong_field(where, name, fields[name], "a number, or null")
    for name in TOKENS:
        _check_tokens(fields.get(name), name, where)
    for name in ("dtype", "torch_dtype"):
        _check_dtype(fields.get(name), name, where)
    classes = fields.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(each, str) for each in classes)):
        raise wrong_field(where, "architectures", classes, "a list of class names, or null")
    quantization = fields.get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict):
        raise wrong_field(where, "quantization_config", quantization, "an object, or be left out")
    if not isinstance(fields.get("porter", {}), dict):
        raise wrong_field(where, "porter", fields["porter"], "an object, or be left out")
    _check_auto_map(fields.get("auto_map"), where)
    _check_rope(fields, where)
    _check_compress_rates(fields.get("compress_rates"), where)
    _check_nested(fields, where)


def _check_auto_map(mapping: Any, where: str) -> None:
    """The classes of a checkpoint's own code; a tokenizer may be a list of a slow and a fast one."""
    if mapping is None:
        return
    if not isinstance(mapping, dict):
        raise wrong_field(where, "auto_map", mapping, "an object: auto class to module.Class")
    for name, value in mapping.items():
        if name != "AutoTokenizer" and not isinstance(value, str):
            raise wrong_field(where, f"auto_map.{name}", value, "module.Class")


def _check_compress_rates(rates: Any, where: str) -> None:
    """Tokens to an entry of a compressed cache, by type of layer."""
    if rates is None:
        return
    if not isinstance(rates, dict):
        raise wrong_field(where, "compress_rates", rates, "an object: type of layer to tokens of one entry")
    for kind, rate in rates.items():
        _check_integer(rate, f"compress_rates.{kind}", 1, SIZE_LIMIT, where)


def _check_nested(fields: Mapping[str, Any], where: str) -> None:
    """The configs of the text model and the vision tower, which are objects of fields themselves."""
    for name in NESTED:
        nested = fields.get(name)
        if nested is None:
            continue
        if not isinstance(nested, dict):
            raise wrong_field(where, name, nested, "an object")
        within = f"{where}: {name}"
        if name == "text_config":
            check_fields(nested, within)
        for size, value in vision_sizes(nested).items() if name == "vision_config" else ():
            _check_integer(value, size, 1, MOST["num_hidden_layers"] if size == "depth" else SIZE_LIMIT, within)


def wrong_field(where: str, name: str, value: Any, expected: str) -> PorterError:
    """The error that names file, field, value and what is expected."""
    return PorterError(f"{where}: {name} is {shown(repr(value))}; must be {expected}")


def is_number(value: Any, low: float, high: float) -> bool:
    """Whether `value` is a number from `low` to `high`; infinity and NaN are none."""
    return type(value) in (int, float) and math.isfinite(value) and low <= value <= high


def _check_integer(value: Any, name: str, low: int, high: int, where: str) -> None:
    if type(value) is not int:
        raise wrong_field(where, name, value, "an integer")
    if value < low:
        raise wrong_field(where, name, value, f"at least {low}")
    if value > high:
        raise wrong_field(where, name, value, f"at most {high}")


def _check_tokens(value: Any, name: str, where: str) -> None:
    many = name == "eos_token_id" and isinstance(value, list) and value
    for token in value if many else [value]:
        if token is not None and (type(token) is not int or token < 0):
            lists = ", a list of them" if name == "eos_token_id" else ""
            raise wrong_field(where, name, value, f"a token id{lists} or null")


def _check_dtype(value: Any, name: str, where: str) -> None:
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
    if value not in (None, "auto") and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise wrong_field(where, name, value, 'a floating-point dtype such as "bfloat16"')


def _check_rope(fields: Mapping[str, Any], where: str) -> None:
    """The rope parameters are an object of numbers, lists of numbers, and a known type."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for field in ("rope_parameters", "rope_scaling"):
        rope = fields.get(field)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise wrong_field(where, field, rope, "an object with rope_type, or null")
        if any(isinstance(value, dict) for value in rope.values()):
            continue  # one entry per layer type, which the families here do not have
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "mrope", *ROPE_INIT_FUNCTIONS):
            known = ", ".join(("default", *ROPE_INIT_FUNCTIONS))
            raise wrong_field(where, f"{field}.rope_type", kind, f"one of {known}")
        for name, value in rope.items():
            if name not in ("rope_type", "type", "mrope_section") and not _is_rope_value(name, value):
                raise wrong_field(where, f"{field}.{name}", value, "a positive number")


def _is_rope_value(name: str, value: Any) -> bool:
    if name in ("short_factor", "long_factor"):
        return isinstance(value, list) and bool(value) and all(is_number(v, 1e-9, math.inf) for v in value)
    if name in ("mscale", "mscale_all_dim", "attention_factor"):
        return value is None or is_number(value, 0, math.inf)
    return value is None or isinstance(value, bool) or is_number(value, 1e-9, math.inf)
