"""Tiny random models of the families that porter has no port of, or whose upstream classes are the candidates here."""

from __future__ import annotations

from typing import Any

import torch
from planted import randomise
from torch import nn

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "max_position_embeddings": 128,
    "attn_implementation": "eager",
}  # fmt: skip


def qwen3_next() -> nn.Module:
    """Three layers of gated delta net and one of attention, zero-centred norms, a gated shared expert."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        num_hidden_layers=4, head_dim=16, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, linear_conv_kernel_dim=4, num_experts=8, shared_expert_intermediate_size=24, **SIZES,
    )  # fmt: skip
    model = randomise(Qwen3NextForCausalLM(config))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")):
                parameter.sub_(1)
            elif name.endswith("A_log"):
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 2)
    return model


def qwen3_moe() -> nn.Module:
    """Two layers of attention and experts behind a softmax router."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(num_hidden_layers=2, head_dim=16, num_experts=8, norm_topk_prob=True, **SIZES)
    return randomise(Qwen3MoeForCausalLM(config))


def deepseek_v2() -> nn.Module:
    """A dense layer and one with a group-limited softmax router and a shared expert; latent attention."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=8, n_group=4, topk_group=1, n_shared_experts=1,
        q_lora_rank=24, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
        topk_method="group_limited_greedy", routed_scaling_factor=2.5, **{**SIZES, "num_key_value_heads": 4},
    )  # fmt: skip
    return randomise(DeepseekV2ForCausalLM(config))
