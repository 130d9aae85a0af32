"""What the fields of a config.json must be to each other so that its model can be built and run at its real width.

The reduced-width proof sets most sizes itself and cannot see them; transformers checks types, and only warns of the
rest. Judged on the configuration object, whose defaults are filled in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedConfig

from porter.checkpoint.strict_json import shown
from porter.errors import PorterError
from porter.models.field_rules import (
    PER_LAYER,
    POSITIVE,
    POSITIVE_OR_NULL,
    TOKENS,
    check_fields,
    is_number,
    wrong_field,
)
from porter.models.vision_rules import check_vision

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

BLOCKS = ("indexer_budget", "indexer_compress_ratio")
"""Of an indexer that selects blocks of keys: the tokens of all, and of one."""

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


def check_config(config: Any, where: str) -> None:
    """Raise PorterError naming file, field and rule for a config whose model could be built but not run."""
    check_vision(config, where)
    text = config.get_text_config()
    if not isinstance(text, PreTrainedConfig):
        raise wrong_field(where, "text_config", type(text).__name__, "left out of a config without one")
    if text is not config:
        check_config(text, f"{where}: text_config")
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
    _check_indexer(config, where)
    for name, values in FAMILY_VALUES.get(config.model_type, {}).items():
        if getattr(config, name, values[0]) not in values:
            computed = " or ".join(repr(value) for value in values if value is not None)
            raise wrong_field(where, name, getattr(config, name), f"{computed}, which is what transformers computes")


def _check_layer_kinds(config: Any, where: str) -> None:
    known = LAYER_KINDS.get(config.model_type, frozenset())
    for kind in getattr(config, "layer_types", None) or ():
        if known and kind not in known:
            raise PorterError(f"{where}: layer_types names {kind!r}; must be of {', '.join(sorted(known))}")


def _check_indexer(config: Any, where: str) -> None:
    """Qwen4's config may leave its indexer out, which its layers of indexed attention are built with all the same."""
    if "indexed_attention" in (getattr(config, "layer_types", None) or ()):
        for name in ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", *BLOCKS):
            if getattr(config, name, 0) is None:
                raise wrong_field(where, name, None, "an integer, since layer_types names indexed_attention")


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
    return int(head * share) if type(head) is int and is_number(share, 0, 1) else None


def _check_head_dim(config: Any, where: str) -> None:
    heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if getattr(config, "head_dim", None) is None and type(heads) is int and type(width) is int and width % heads:
        raise wrong_field(where, "hidden_size", width, f"a multiple of num_attention_heads = {heads}, or give head_dim")


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
                raise wrong_field(where, name, token, f"below vocab_size = {vocabulary}")


def _check_activation(config: Any, where: str) -> None:
    from transformers.activations import ACT2FN

    name = getattr(config, "hidden_act", None)
    if name is not None and (not isinstance(name, str) or name not in ACT2FN):
        raise wrong_field(where, "hidden_act", name, "an activation that transformers has, such as 'silu'")
