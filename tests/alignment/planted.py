"""Tiny models whose every parameter matters, goldens of them, and faults to plant in a candidate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from porter.golden.capture import capture
from porter.golden.store import Golden

PROMPT = 20


def randomise(model: nn.Module) -> nn.Module:
    """Norm weights away from one, biases away from zero, matrices of unit gain: nothing is a no-op."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(0.5 * noise if parameter.dim() == 1 else noise / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model.eval()


def qwen2(attention: str = "eager", layers: int = 3) -> Any:
    """A Qwen2 with biases, 4 query heads over 2 key heads."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=128,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        attn_implementation=attention,
    )
    return randomise(Qwen2ForCausalLM(config))


def deepseek_v3(attention: str = "eager", layers: int = 2) -> Any:
    """A DeepSeek-V3 with MLA, yarn, grouped sigmoid routing with a bias, and a shared expert."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=128,
        hidden_size=48,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=layers,
        first_k_dense_replace=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        q_lora_rank=24,
        kv_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        max_position_embeddings=128,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        attn_implementation=attention,
    )
    return randomise(DeepseekV3ForCausalLM(config))


def golden_of(model: nn.Module, path: Path, new_tokens: int = 3, rows: int = 2, **more: Any) -> Golden:
    """Prefill of PROMPT tokens and the decode steps after it."""
    tokens = torch.randint(0, 128, (rows, PROMPT), generator=torch.Generator().manual_seed(3))
    return capture(model, tokens, path, new_tokens=new_tokens, **more)


def bfloat16(model: nn.Module) -> Any:
    """A copy in bfloat16."""
    return copy.deepcopy(model).to(torch.bfloat16)


def halve_key_bias(model: Any) -> str:
    """One layer's k_proj bias at half its size."""
    model.model.layers[1].self_attn.k_proj.bias.mul_(0.5)
    return "model.layers.1.self_attn.k_proj"


def enlarge_eps(model: Any) -> str:
    """One norm's eps a thousand times too large."""
    model.model.layers[1].post_attention_layernorm.variance_epsilon *= 1000
    return "model.layers.1.post_attention_layernorm"


def round_up_proj(model: Any) -> str:
    """One up_proj rounded to five significant bits."""
    weight = model.model.layers[0].mlp.up_proj.weight
    mantissa, exponent = torch.frexp(weight.float())
    weight.copy_(torch.ldexp((mantissa * 32).round() / 32, exponent))
    return "model.layers.0.mlp.up_proj"


def scale_o_proj(model: Any) -> str:
    """One layer's output projection scaled by 1.02."""
    model.model.layers[1].self_attn.o_proj.weight.mul_(1.02)
    return "model.layers.1.self_attn.o_proj"


def interleave_rope(model: Any) -> str:
    """One layer's rotary embedding in the interleaved style."""
    import transformers.models.qwen2.modeling_qwen2 as modelling

    attention = model.model.layers[1].self_attn
    forward, original = attention.forward, modelling.apply_rotary_pos_emb

    def interleaved(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        return original(*(torch.cat([x[..., ::2], x[..., 1::2]], -1) for x in (q, k)), cos, sin)

    def patched(*args: Any, **kwargs: Any) -> Any:
        modelling.apply_rotary_pos_emb = interleaved
        try:
            return forward(*args, **kwargs)
        finally:
            modelling.apply_rotary_pos_emb = original

    attention.forward = patched
    return "model.layers.1.self_attn"


def swap_gate_and_up(model: Any) -> str:
    """One MLP activates the up projection instead of the gate."""
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.up_proj(x)) * mlp.gate_proj(x))
    return "model.layers.1.mlp"


def drop_residual(model: Any) -> str:
    """One decoder layer does not add its input to the attention's output."""
    layer = model.model.layers[1]

    def forward(hidden_states: Any, **kwargs: Any) -> Any:
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        return attended + layer.mlp(layer.post_attention_layernorm(attended))

    layer.forward = forward
    return "model.layers.1"


FAULTS: dict[str, Callable[[Any], str]] = {
    fault.__name__: fault
    for fault in (
        halve_key_bias,
        enlarge_eps,
        round_up_proj,
        scale_o_proj,
        interleave_rope,
        swap_gate_and_up,
        drop_residual,
    )
}
"""Each plants its fault in a Qwen2 and returns the module that must be found."""
