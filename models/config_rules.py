"""What a config.json must say so that its model can be built and run at its real width.

The reduced-width proof sets most sizes itself and cannot see them; transformers checks types, and only warns of the
rest. `check_fields` judges the file's own fields, before anything is built from them; `check_config` the relations
between the fields of the configuration object, whose defaults are filled in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from porter.checkpoint.strict_json import shown
from porter.errors import PorterError
from porter.models.vision_rules import NESTED, check_vision, vision_sizes

SIZE_LIMIT = 2**31 - 1
"""The largest size that 32-bit kernel arguments hold."""

MOST = {
    "num_hidden_layers": 4096,
    "n_routed_experts": 65_536,
    "num_experts": 65_536,
    "num_local_experts": 65_536,
    "num_nextn_predict_layers": 64,
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
NOT_NEGATIVE_OR_NULL = ("num_nextn_predict_layers",)
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

SIGMOID_SCORES: Mapping[str, tuple[object, ...]] = {
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}
FAMILY_VALUES: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "deepseek_v2": {
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False, None),
        "moe_layer_freq": (1,),
    },
    "deepseek_v3": SIGMOID_SCORES,
    "deepseek_v32": SIGMOID_SCORES,
    "deepseek_v4": {"scoring_func": ("sqrtsoftplus",), "topk_method": ("noaux_tc",), "norm_topk_prob": (True,)},
}
"""Fields that transformers ignores, or reads without a check, with the values that its code computes."""

LAYER_KINDS: Mapping[str, frozenset[str]] = {
    "deepseek_v32": frozenset({"indexed_attention"}),
    "glm_moe_dsa": frozenset({"indexed_attention"}),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), frozenset({"linear_attention", "full_attention"})
    ),
}
"""Types of layer that the code of a model type has; transformers lets `layer_types` name any that some model has, and
makes caches by them."""

Rule = tuple[tuple[str, ...], Callable[..., bool], str]
RULES: tuple[Rule, ...] = (
    (("num_attention_heads", "num_key_value_heads"), lambda q, kv: q % kv == 0, "must be a multiple of {1} = {b}"),
    (("n_routed_experts", "n_group"), lambda experts, groups: experts % groups == 0, "must be a multiple of {1} = {b}"),
    (("n_routed_experts", "n_group"), lambda experts, n: experts >= 2 * n, "must be at least twice {1} = {b}"),
    (("topk_group", "n_group"), lambda chosen, groups: chosen <= groups, "must be at most {1} = {b}"),
    (
        ("linear_num_value_heads", "linear_num_key_heads"),
        lambda values, keys: values % keys == 0,
        "must be a multiple of {1} = {b}",
    ),
    (("index_head_dim", "qk_rope_head_dim"), lambda head, rope: head >= rope, "must be at least {1} = {b}"),
    (("num_attention_heads", "o_groups"), lambda heads, groups: heads % groups == 0, "must be a multiple of {1} = {b}"),
    (("num_experts_per_tok", "n_routed_experts"), lambda k, experts: k <= experts, "must be at most {1} = {b}"),
    (
        ("num_experts_per_tok", "num_experts"),
        lambda k, experts: experts == 0 or k <= experts,
        "must be at most {1} = {b}",
    ),
    (
        ("num_experts_per_tok", "topk_group", "n_routed_experts", "n_group"),
        lambda k, chosen, experts, groups: k <= chosen * (experts // groups),
        "must be at most the experts of {1} = {b} groups",
    ),
)
LATENT_RULES: tuple[Rule, ...] = (
    (("num_key_value_heads", "num_attention_heads"), lambda kv, heads: kv == heads, "must be {1} = {b}"),
    (("head_dim", "qk_rope_head_dim"), lambda head, rope: head == rope, "must be {1} = {b}, or be left out"),
    (
        ("qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"),
        lambda both, nope, rope: both == nope + rope,
        "must be {1} + {2}, or be left out",
    ),
)
"""Of latent attention: transformers derives these fields, and lets a config.json set them to something else."""


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
        raise _wrong(where, "head_dim", None, "qk_rope_head_dim, or be left out")
    for name in SWITCHES:
        if not isinstance(fields.get(name, False), bool):
            raise _wrong(where, name, fields[name], "true or false")
    for name, (least, most) in FRACTIONS.items():
        if name in fields and not _is_number(fields[name], least, most):
            raise _wrong(where, name, fields[name], f"a number from {least:g} to {most:g}")
    for name in GENERATION:
        if fields.get(name) is not None and not _is_number(fields[name], 0.0, math.inf):
            raise _wrong(where, name, fields[name], "a number, or null")
    for name in TOKENS:
        _check_tokens(fields.get(name), name, where)
    for name in ("dtype", "torch_dtype"):
        _check_dtype(fields.get(name), name, where)
    classes = fields.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(each, str) for each in classes)):
        raise _wrong(where, "architectures", classes, "a list of class names, or null")
    _check_auto_map(fields.get("auto_map"), where)
    _check_rope(fields, where)
    _check_compress_rates(fields.get("compress_rates"), where)
    _check_nested(fields, where)


def _check_auto_map(mapping: Any, where: str) -> None:
    """The classes of a checkpoint's own code; a tokenizer may be a list of a slow and a fast one."""
    if mapping is None:
        return
    if not isinstance(mapping, dict):
        raise _wrong(where, "auto_map", mapping, "an object: auto class to module.Class")
    for name, value in mapping.items():
        if name != "AutoTokenizer" and not isinstance(value, str):
            raise _wrong(where, f"auto_map.{name}", value, "module.Class")


def _check_compress_rates(rates: Any, where: str) -> None:
    """Tokens to an entry of a compressed cache, by type of layer."""
    if rates is None:
        return
    if not isinstance(rates, dict):
        raise _wrong(where, "compress_rates", rates, "an object: type of layer to tokens of one entry")
    for kind, rate in rates.items():
        _check_integer(rate, f"compress_rates.{kind}", 1, SIZE_LIMIT, where)


def _check_nested(fields: Mapping[str, Any], where: str) -> None:
    """The configs of the text model and the vision tower, which are objects of fields themselves."""
    for name in NESTED:
        nested = fields.get(name)
        if nested is None:
            continue
        if not isinstance(nested, dict):
            raise _wrong(where, name, nested, "an object")
        within = f"{where}: {name}"
        if name == "text_config":
            check_fields(nested, within)
        for size, value in vision_sizes(nested).items() if name == "vision_config" else ():
            _check_integer(value, size, 1, MOST["num_hidden_layers"] if size == "depth" else SIZE_LIMIT, within)


def check_config(config: Any, where: str) -> None:
    """Raise PorterError naming file, field and rule for a config whose model could be built but not run."""
    check_vision(config, where)
    if config.get_text_config() is not config:
        check_config(config.get_text_config(), f"{where}: text_config")
    names = (*POSITIVE, *POSITIVE_OR_NULL)
    numbers = {name: v for name in names if type(v := getattr(config, name, None)) is int}
    check_fields(numbers | {"use_sliding_window": getattr(config, "use_sliding_window", True)}, where)
    for rule in (*RULES, *(LATENT_RULES if hasattr(config, "kv_lora_rank") else ())):
        _check_rule(rule, config, where)
    if hasattr(config, "rope_parameters"):
        _check_head_dim(config, where)
        _check_rope_lengths(config, where)
    _check_tokens_fit(config, where)
    _check_activation(config, where)
    _check_layer_kinds(config, where)
    for name, values in FAMILY_VALUES.get(config.model_type, {}).items():
        if getattr(config, name, values[0]) not in values:
            computed = " or ".join(repr(value) for value in values if value is not None)
            raise _wrong(where, name, getattr(config, name), f"{computed}, which is what transformers computes")


def _check_layer_kinds(config: Any, where: str) -> None:
    known = LAYER_KINDS.get(config.model_type, frozenset())
    for kind in getattr(config, "layer_types", None) or ():
        if known and kind not in known:
            raise PorterError(f"{where}: layer_types names {kind!r}; must be of {', '.join(sorted(known))}")


def _wrong(where: str, name: str, value: Any, expected: str) -> PorterError:
    return PorterError(f"{where}: {name} is {shown(repr(value))}; must be {expected}")


def _is_number(value: Any, low: float, high: float) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and low <= value <= high


def _check_integer(value: Any, name: str, low: int, high: int, where: str) -> None:
    if type(value) is not int:
        raise _wrong(where, name, value, "an integer")
    if value < low:
        raise _wrong(where, name, value, f"at least {low}")
    if value > high:
        raise _wrong(where, name, value, f"at most {high}")


def _check_tokens(value: Any, name: str, where: str) -> None:
    many = name == "eos_token_id" and isinstance(value, list) and value
    for token in value if many else [value]:
        if token is not None and (type(token) is not int or token < 0):
            lists = ", a list of them" if name == "eos_token_id" else ""
            raise _wrong(where, name, value, f"a token id{lists} or null")


def _check_dtype(value: Any, name: str, where: str) -> None:
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
    if value not in (None, "auto") and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise _wrong(where, name, value, 'a floating-point dtype such as "bfloat16"')


def _check_rope(fields: Mapping[str, Any], where: str) -> None:
    """The rope parameters are an object of numbers, lists of numbers, and a known type."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for field in ("rope_parameters", "rope_scaling"):
        rope = fields.get(field)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise _wrong(where, field, rope, "an object with rope_type, or null")
        if any(isinstance(value, dict) for value in rope.values()):
            continue  # one entry per layer type, which the families here do not have
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "mrope", *ROPE_INIT_FUNCTIONS):
            known = ", ".join(("default", *ROPE_INIT_FUNCTIONS))
            raise _wrong(where, f"{field}.rope_type", kind, f"one of {known}")
        for name, value in rope.items():
            if name not in ("rope_type", "type", "mrope_section") and not _is_rope_value(name, value):
                raise _wrong(where, f"{field}.{name}", value, "a positive number")


def _is_rope_value(name: str, value: Any) -> bool:
    if name in ("short_factor", "long_factor"):
        return isinstance(value, list) and bool(value) and all(_is_number(v, 1e-9, math.inf) for v in value)
    if name in ("mscale", "mscale_all_dim", "attention_factor"):
        return value is None or _is_number(value, 0, math.inf)
    return value is None or isinstance(value, bool) or _is_number(value, 1e-9, math.inf)


def _check_rule(rule: Rule, config: Any, where: str) -> None:
    names, holds, words = rule
    values = [getattr(config, name, None) for name in names]
    if any(
        value is None or (name in PER_LAYER and isinstance(value, list))
        for name, value in zip(names, values, strict=True)
    ):
        return
    if any(type(value) is not int for value in values) or not holds(*values):
        raise PorterError(f"{where}: {names[0]} is {shown(repr(values[0]))}; {words.format(*names, b=values[1])}")


def _rotary_dimension(config: Any) -> int | None:
    """The head dimensions that rotate, as transformers' rope functions count them."""
    head = getattr(config, "head_dim", None)
    if head is None and isinstance(getattr(config, "num_attention_heads", None), int):
        head = config.hidden_size // config.num_attention_heads
    share = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    return int(head * share) if type(head) is int and _is_number(share, 0, 1) else None


def _check_head_dim(config: Any, where: str) -> None:
    heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if getattr(config, "head_dim", None) is None and type(heads) is int and type(width) is int and width % heads:
        raise _wrong(where, "hidden_size", width, f"a multiple of num_attention_heads = {heads}, or give head_dim")


def _check_rope_lengths(config: Any, where: str) -> None:
    rope, rotary = config.rope_parameters or {}, _rotary_dimension(config)
    for name in ("short_factor", "long_factor"):
        factors = rope.get(name)
        if isinstance(factors, list) and rotary is not None and len(factors) != rotary // 2:
            raise PorterError(
                f"{where}: rope_parameters.{name} has {len(factors)} factors; must have {rotary // 2}, one for each "
                "pair of rotated head dimensions"
            )


def _check_tokens_fit(config: Any, where: str) -> None:
    vocabulary = getattr(config, "vocab_size", None)
    for name in TOKENS:
        value = getattr(config, name, None)
        for token in value if isinstance(value, list) else [value]:
            if type(token) is int and type(vocabulary) is int and token >= vocabulary:
                raise _wrong(where, name, token, f"below vocab_size = {vocabulary}")


def _check_activation(config: Any, where: str) -> None:
    from transformers.activations import ACT2FN

    name = getattr(config, "hidden_act", None)
    if name is not None and (not isinstance(name, str) or name not in ACT2FN):
        raise _wrong(where, "hidden_act", name, "an activation that transformers has, such as 'silu'")
