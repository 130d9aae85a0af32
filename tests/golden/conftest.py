"""Tiny random models of the two families, built once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn


@pytest.fixture(scope="session")
def qwen3() -> Callable[..., nn.Module]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def build(seed: int = 0, **overrides: object) -> nn.Module:
        torch.manual_seed(seed)
        settings = dict(
            vocab_size=61, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8,
        )  # fmt: skip
        model: nn.Module = Qwen3ForCausalLM(Qwen3Config(**(settings | overrides))).eval()
        return model

    return build


@pytest.fixture(scope="session")
def deepseek_v3() -> Callable[..., nn.Module]:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    def build(seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        config = DeepseekV3Config(
            vocab_size=67, hidden_size=32, intermediate_size=40, moe_intermediate_size=12, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, n_routed_experts=8, num_experts_per_tok=2, n_group=2,
            topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=12, qk_nope_head_dim=8,
            qk_rope_head_dim=4, v_head_dim=8,
        )  # fmt: skip
        model: nn.Module = DeepseekV3ForCausalLM(config).eval()
        return model

    return build
