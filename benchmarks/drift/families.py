"""The models that faults are planted in: one small trained model per family, kept in a cache folder.

`qwen3` and `deepseek_v3` are the checkpoints that porter ships (trained 1,200 and 1,000 steps). The others are trained
here, on the same text, for `STEPS` steps: enough that attention attends, routers choose and norm weights differ, which
random weights do not do and which hides faults. Weights that training leaves at their initial zeros (biases of so few
steps) are given the spread of released models.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

STEPS, ROWS, LENGTH = 300, 8, 96
SHIPPED = Path(__file__).parents[2] / "models" / "shipped"
TEXT = SHIPPED / "text" / "persuasion.txt"
VOCABULARY = 264
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=64, num_attention_heads=4, max_position_embeddings=512, initializer_range=0.05,
    bos_token_id=None, eos_token_id=None, pad_token_id=256,
)  # fmt: skip
HEAD: dict[str, Any] = dict(head_dim=16)
EXPERTS: dict[str, Any] = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, decoder_sparse_step=1)


@dataclass(frozen=True)
class Family:
    """One family: `config()` of its small model, and whether porter ports it (else upstream's class is the port)."""

    name: str
    config: Callable[[], Any]
    ported: bool
    layers: int
    first_sparse: int | None = None
    shipped: str | None = None

    @property
    def sparse(self) -> tuple[int, ...]:
        """The layers with routed experts."""
        return () if self.first_sparse is None else tuple(range(self.first_sparse, self.layers))


def qwen2() -> Any:
    """Biases on q, k and v; a sliding window of 8 tokens from layer 1 on."""
    from transformers import Qwen2Config

    return Qwen2Config(
        **SIZES, num_hidden_layers=3, num_key_value_heads=2, intermediate_size=160, tie_word_embeddings=False,
        use_sliding_window=True, sliding_window=8, max_window_layers=1,
    )  # fmt: skip


def llama() -> Any:
    """Llama-3's scaled rotary frequencies, tied embeddings."""
    from transformers import LlamaConfig

    rope = dict(
        rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )  # fmt: skip
    return LlamaConfig(
        **SIZES, num_hidden_layers=3, num_key_value_heads=2, intermediate_size=160, tie_word_embeddings=True,
        rope_parameters=rope,
    )  # fmt: skip


def qwen3_moe() -> Any:
    """Softmax routing, renormalised, in every layer."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **SIZES, **EXPERTS, **HEAD, num_hidden_layers=3, num_key_value_heads=2, intermediate_size=160,
        norm_topk_prob=True, tie_word_embeddings=False,
    )  # fmt: skip


def qwen2_moe() -> Any:
    """Softmax routing without renormalisation, and a gated shared expert."""
    from transformers import Qwen2MoeConfig

    return Qwen2MoeConfig(
        **SIZES, **EXPERTS, num_hidden_layers=3, num_key_value_heads=4, intermediate_size=160,
        shared_expert_intermediate_size=64, norm_topk_prob=False, tie_word_embeddings=False,
    )  # fmt: skip


def deepseek_v2() -> Any:
    """Latent attention with interleaved rope and yarn, groups of experts by their best, shared experts."""
    from transformers import DeepseekV2Config

    rope = dict(
        rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64, beta_fast=32,
        beta_slow=1, mscale=0.707, mscale_all_dim=0.707,
    )  # fmt: skip
    return DeepseekV2Config(
        **SIZES, num_hidden_layers=3, num_key_value_heads=4, intermediate_size=160, moe_intermediate_size=48,
        first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2,
        topk_method="group_limited_greedy", n_shared_experts=1, routed_scaling_factor=1.5, q_lora_rank=None,
        kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, rope_parameters=rope,
        tie_word_embeddings=False,
    )  # fmt: skip


def qwen3_next() -> Any:
    """Three gated delta nets and one gated attention, zero-centred norms, partial rope, routed and shared experts."""
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        **SIZES, **EXPERTS, num_hidden_layers=4, num_key_value_heads=2, head_dim=16, intermediate_size=160,
        linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4, shared_expert_intermediate_size=64, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
    )  # fmt: skip


def _shipped(name: str) -> Callable[[], Any]:
    def config() -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(SHIPPED / name)

    return config


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("qwen2", qwen2, True, 3),
        Family("qwen3", _shipped("tiny-qwen3"), True, 3, shipped="tiny-qwen3"),
        Family("deepseek_v3", _shipped("tiny-deepseek-v3"), True, 4, 1, shipped="tiny-deepseek-v3"),
        Family("llama", llama, False, 3),
        Family("qwen3_moe", qwen3_moe, False, 3, 0),
        Family("qwen2_moe", qwen2_moe, False, 3, 0),
        Family("deepseek_v2", deepseek_v2, False, 3, 1),
        Family("qwen3_next", qwen3_next, False, 4, 0),
    )
}


def cache_folder() -> Path:
    """$PORTER_DRIFT_CACHE, else porter/drift under the user's cache folder."""
    given = os.environ.get("PORTER_DRIFT_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else home / "porter" / "drift"


def checkpoint(family: Family) -> Path:
    """The folder of the family's float32 checkpoint, trained first where it is not there."""
    if family.shipped is not None:
        return SHIPPED / family.shipped
    config = family.config()
    recipe = json.dumps([config.to_dict(), STEPS, ROWS, LENGTH], sort_keys=True, default=str)
    path = cache_folder() / f"{family.name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if not path.is_dir():
        aside = path.with_name(f"{path.name}.{os.getpid()}")
        train(config).save_pretrained(aside)
        try:
            aside.rename(path)
        except OSError:
            # Another process was faster.
            shutil.rmtree(aside)
    return path


def read_text() -> torch.Tensor:
    """The bytes of the training text as int64."""
    return torch.tensor(list(TEXT.read_bytes()))


def train(config: Any) -> Any:
    """A float32 model of `config` after STEPS steps of AdamW, from a fixed seed, on one thread's worth of work."""
    from transformers import AutoModelForCausalLM

    text = read_text()
    torch.manual_seed(20260101)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    _spread(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, STEPS, pct_start=0.1)
    for _ in range(STEPS):
        starts = torch.randint(len(text) - LENGTH, (ROWS,))
        rows = text[starts[:, None] + torch.arange(LENGTH + 1)]
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def _spread(model: Any) -> None:
    """Biases with a spread of 0.2 and norm weights of 0.15 to start from: training so briefly would not get there."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif "norm" in name:
                parameter.add_(0.15 * torch.randn_like(parameter))


def load(family: Family, dtype: torch.dtype, attention: str = "eager") -> Any:
    """The family's model in `dtype`, upstream's class."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=dtype, attn_implementation=attention)
    return model.eval()
