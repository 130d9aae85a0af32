"""Relations between a config's fields that the reduced-width proof cannot see, since it sets these fields itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from porter.errors import PorterError

POSITIVE = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
)

Rule = tuple[tuple[str, ...], Callable[..., bool], str]
RULES: tuple[Rule, ...] = (
    (("num_attention_heads", "num_key_value_heads"), lambda q, kv: q % kv == 0, "must be a multiple of {1} = {b}"),
    (("n_routed_experts", "n_group"), lambda experts, groups: experts % groups == 0, "must be a multiple of {1} = {b}"),
    (("topk_group", "n_group"), lambda chosen, groups: chosen <= groups, "must be at most {1} = {b}"),
    (("num_experts_per_tok", "n_routed_experts"), lambda k, experts: k <= experts, "must be at most {1} = {b}"),
)


def check_config(config: Any, where: str) -> None:
    """Raise PorterError naming file, field and rule for a config whose model could be built but not run."""
    for name in POSITIVE:
        value = getattr(config, name, None)
        if isinstance(value, int) and value < 1:
            raise PorterError(f"{where}: {name} is {value}; must be at least 1")
    for names, holds, words in RULES:
        values = [getattr(config, name, None) for name in names]
        if all(isinstance(value, int) for value in values) and not holds(*values):
            raise PorterError(f"{where}: {names[0]} is {values[0]}; {words.format(*names, b=values[1])}")
