"""Faults of attention: scale, mask, window, heads, cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.drift import layers
from benchmarks.drift.case import Fault, Plant
from benchmarks.drift.layers import Attend
from benchmarks.drift.site import Function, Site


def scaled(factor: Callable[[Site], float]) -> Plant:
    def plant(site: Site) -> str:
        site.module("self_attn").scaling *= factor(site)
        return site.path("self_attn")

    return plant


def hidden_over_heads(site: Site) -> float:
    """1 / sqrt(hidden / heads) where the head is of another size."""
    config, attention = site.model.config, site.module("self_attn")
    size = getattr(attention, "qk_head_dim", None) or attention.head_dim
    other = config.hidden_size // config.num_attention_heads
    return math.sqrt(size / other) if size != other else math.sqrt(2.0)


def without_mscale(site: Site) -> float:
    """Yarn's mscale_all_dim squared left out of the scale of the softmax."""
    rope = site.model.config.rope_parameters
    return float((0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1.0) ** -2)


def with_mscale_once(site: Site) -> float:
    """mscale_all_dim not squared."""
    return math.sqrt(without_mscale(site))


def attending(**twist: Any) -> Plant:
    return lambda site: layers.attention(site, Attend(**twist))


def everything(mask: Tensor) -> Tensor:
    return torch.ones_like(mask)


def next_too(mask: Tensor) -> Tensor:
    seen = mask.clone()
    seen[..., 1:] |= mask[..., :-1]
    return seen


def not_itself(mask: Tensor) -> Tensor:
    """A mask of k < q: every token but the first misses itself."""
    seen = mask.clone()
    seen[..., :-1] &= mask[..., 1:] | (mask.cumsum(-1)[..., :-1] < 2)
    return seen


def beyond(position: int) -> Callable[[Tensor], Tensor]:
    """A kernel that ignores its mask for keys from `position` on."""

    def seen(mask: Tensor) -> Tensor:
        return mask | (torch.arange(mask.shape[-1], device=mask.device) >= position)

    return seen


def not_first(mask: Tensor) -> Tensor:
    seen = mask.clone()
    seen[..., 0] &= seen.sum(-1) < 2
    return seen


def kernel_beyond(site: Site) -> str:
    """The kernel alone is wrong; its reference is right."""
    attend = Attend(visible=beyond(16))
    return site.kernel("self_attn", "attention", lambda reference, *rest: attend(*rest))


def kernel_half_scores(site: Site) -> str:
    """A kernel that keeps its scores in float16 of few bits."""

    def coarse(scores: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(scores)
        return torch.ldexp((mantissa * 16).round() / 16, exponent)

    attend = Attend(scores=coarse)
    return site.kernel("self_attn", "attention", lambda reference, *rest: attend(*rest))


def heads_of(name: str, heads: str, dim: int, count: str) -> Plant:
    """Whole heads of a projection in another order."""

    def plant(site: Site) -> tuple[str, ...]:
        number = getattr(site.model.config, count)

        def moved(weight: Tensor) -> Tensor:
            parts: Tensor = weight.unflatten(dim, (number, -1))
            order = torch.arange(number).roll(1) if heads == "roll" else torch.arange(number).flip(0)
            return parts.index_select(dim, order).flatten(dim, dim + 1)

        return site.change(f"self_attn.{name}", moved), site.path("self_attn")

    return plant


def cached(change: Function) -> Plant:
    return lambda site: layers.cache(site, change)


def last_not_written(key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """In decode, attention reads the cache before the present token is in it."""
    if key.shape[2] > 1:
        return keys, values
    keys, values = keys.clone(), values.clone()
    keys[:, :, -1], values[:, :, -1] = 0, 0
    return keys, values


def one_behind(key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """In decode, the slot of the present token holds the one before."""
    if key.shape[2] > 1:
        return keys, values
    return torch.cat([keys[:, :, :-1], keys[:, :, -2:-1]], 2), torch.cat([values[:, :, :-1], values[:, :, -2:-1]], 2)


def overwritten(key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """In decode, the present token overwrites the last of the prompt."""
    if key.shape[2] > 1:
        return keys, values
    keys, values = keys.clone(), values.clone()
    keys[:, :, -2], values[:, :, -2] = keys[:, :, -1], values[:, :, -1]
    return keys, values


def rows_exchanged(key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """In decode, a request reads the keys of another."""
    if key.shape[2] > 1:
        return keys, values
    return keys.flip(0), values


FULL = ("qwen3", "qwen2", "llama")
FAULTS = (
    Fault("scale-hidden-over-heads", ("attention-scale",), ("deepseek_v3", "qwen2"), scaled(hidden_over_heads)),
    Fault("scale-subtle", ("attention-scale",), ("qwen3", "qwen2_moe"), scaled(lambda site: 1.02)),
    Fault("scale-none-all", ("attention-scale",), ("qwen3", "llama"), scaled(lambda site: 4.0), "all"),
    Fault("scale-no-mscale", ("attention-scale",), ("deepseek_v3", "deepseek_v2"), scaled(without_mscale)),
    Fault("scale-mscale-once", ("attention-scale",), ("deepseek_v2",), scaled(with_mscale_once), "all"),
    Fault("mask-none", ("attention-mask",), ("qwen3", "deepseek_v3", "llama"), attending(visible=everything)),
    Fault("mask-next-token", ("attention-mask",), ("llama", "qwen3_moe"), attending(visible=next_too)),
    Fault("mask-not-itself", ("attention-mask",), ("qwen3",), attending(visible=not_itself)),
    Fault("mask-beyond-16", ("attention-mask",), ("qwen3", "llama"), attending(visible=beyond(16))),
    Fault("mask-beyond-16-kernel", ("attention-mask",), ("qwen3",), kernel_beyond),
    Fault("mask-first-hidden", ("attention-mask",), ("qwen3",), attending(visible=not_first)),
    Fault(
        "scores-raw",
        ("attention-not-softmaxed",),
        ("llama",),
        attending(normalise=lambda s: s.masked_fill(s.isinf(), 0)),
    ),
    Fault("scores-exponential", ("attention-not-softmaxed",), ("qwen3",), attending(normalise=torch.exp)),
    Fault("scores-sigmoid", ("attention-not-softmaxed",), ("qwen2",), attending(normalise=torch.sigmoid)),
    Fault("kv-heads-tiled", ("kv-head-order",), ("qwen3", "llama", "qwen3_moe"), attending(tiled=True)),
    Fault("k-heads-swapped", ("kv-head-order",), ("qwen2",), heads_of("k_proj", "roll", 0, "num_key_value_heads")),
    Fault("v-heads-swapped", ("kv-head-order",), ("llama",), heads_of("v_proj", "roll", 0, "num_key_value_heads")),
    Fault(
        "q-heads-rolled",
        ("head-permutation",),
        ("qwen3", "llama"),
        heads_of("q_proj", "roll", 0, "num_attention_heads"),
    ),
    Fault("o-heads-flipped", ("head-permutation",), ("qwen2",), heads_of("o_proj", "flip", 1, "num_attention_heads")),
    Fault("cache-last-missing", ("kv-cache-stale",), ("qwen3", "llama"), cached(last_not_written)),
    Fault("cache-one-behind", ("kv-cache-stale",), ("qwen2", "deepseek_v3"), cached(one_behind)),
    Fault("cache-overwritten", ("kv-cache-stale",), ("deepseek_v2",), cached(overwritten)),
    Fault("cache-of-another-row", ("kv-cache-stale",), ("qwen3",), cached(rows_exchanged)),
    Fault(
        "window-off-by-one",
        ("sliding-window",),
        ("qwen2",),
        attending(window=lambda w: w and w - 1, ignore_mask=True),
        layers="sliding",
    ),
    Fault(
        "window-ignored",
        ("sliding-window",),
        ("qwen2",),
        attending(window=lambda w: None, ignore_mask=True),
        layers="sliding",
    ),
    Fault("window-stray", ("sliding-window",), ("qwen3", "llama"), attending(window=lambda w: 12, ignore_mask=True)),
)
"""Planted in one layer unless named all."""
