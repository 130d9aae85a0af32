"""The models that recording is timed on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def qwen3_8x512() -> nn.Module:
    """Qwen3 with 8 layers, hidden 512, vocabulary 4096, random weights: 29 M parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
            num_key_value_heads=4, head_dim=64, tie_word_embeddings=False, attn_implementation="eager",
        )
    )  # fmt: skip


def llama_135m() -> nn.Module:
    """Llama with 30 layers, hidden 576, vocabulary 49152, random weights: 135 M parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, tie_word_embeddings=True,
        )
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {"qwen3-8x512": qwen3_8x512, "llama-135m": llama_135m}


def build(name: str, dtype: str, tokens: int) -> tuple[nn.Module, Tensor]:
    """The model of that name (else the checkpoint in that directory) in evaluation mode, and token ids [1, tokens]."""
    torch.manual_seed(0)
    if name in MODELS:
        model: Any = MODELS[name]().to(getattr(torch, dtype))
    else:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))
    generator = torch.Generator().manual_seed(1)
    return model.eval(), torch.randint(0, 4096, (1, tokens), generator=generator)
