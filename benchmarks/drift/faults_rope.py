"""Faults of positions: rotary style, tables and offsets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.drift import layers
from benchmarks.drift.case import Fault, Plant
from benchmarks.drift.site import Function, Site

ROTARY = "model.rotary_emb"


def turned(turn: Callable[[Tensor, Tensor, Tensor], Tensor], keys: bool = True) -> Plant:
    return lambda site: layers.rope(site, turn, keys=keys)


def rows_for_other_style(site: Site) -> tuple[str, ...]:
    """q and k rows stored for the other style, as a checkpoint converter that permutes once too often leaves them."""

    def permuted(weight: Tensor) -> Tensor:
        size = site.module("self_attn").head_dim
        shape = (weight.shape[0] // size, 2, size // 2, *weight.shape[1:])
        return weight.view(shape).transpose(1, 2).reshape(weight.shape)

    first = site.change("self_attn.q_proj", permuted)
    return first, site.change("self_attn.k_proj", permuted), site.path("self_attn")


def complex_half(site: Site) -> str:
    """DeepSeek-V2's complex rotation over halves instead of pairs."""

    def rotate(q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        turned = []
        for x in (q, k):
            first, second = layers.wide(x).chunk(2, dim=-1)
            y = torch.complex(first, second) * table.unsqueeze(1)
            turned.append(torch.cat([y.real, y.imag], -1).to(x.dtype))
        return turned[0], turned[1]

    return site.global_function("self_attn", apply_rotary_emb=rotate)


def frequencies(change: Callable[[Tensor, Any], Tensor]) -> Plant:
    """Another table of inverse frequencies."""

    def plant(site: Site) -> str:
        rotary = site.module(ROTARY)
        rotary.inv_freq = change(rotary.inv_freq, site).to(rotary.inv_freq.dtype)
        if hasattr(rotary, "original_inv_freq"):
            rotary.original_inv_freq = rotary.inv_freq.clone()
        return ROTARY

    return plant


def plain(theta: float) -> Callable[[Tensor, Any], Tensor]:
    return lambda table, site: theta ** -(torch.arange(len(table), dtype=torch.float32) / len(table))


def positions(change: Callable[[Tensor], Tensor], when: Callable[[Tensor], bool] = lambda ids: True) -> Plant:
    def plant(site: Site) -> str:
        def forward(self: Any, original: Function, x: Tensor, position_ids: Tensor) -> Any:
            return original(x, change(position_ids) if when(position_ids) else position_ids)

        return site.forward(ROTARY, forward)

    return plant


def decoding(ids: Tensor) -> bool:
    return ids.shape[-1] == 1


def attention_factor(factor: float) -> Plant:
    def plant(site: Site) -> str:
        site.module(ROTARY).attention_scaling *= factor
        return ROTARY

    return plant


FAULTS = (
    Fault("rope-interleaved", ("rope-style",), ("qwen3", "llama", "qwen2"), turned(layers.interleaved_turn)),
    Fault("rope-interleaved-all", ("rope-style",), ("qwen3_moe", "qwen2"), turned(layers.interleaved_turn), "all"),
    Fault("rope-half", ("rope-style",), ("deepseek_v3",), turned(layers.half_turn)),
    Fault("rope-half-complex", ("rope-style",), ("deepseek_v2",), complex_half),
    Fault("rope-backward", ("rope-style",), ("qwen3",), turned(layers.backward_turn)),
    Fault("rope-not-on-keys", ("rope-style",), ("qwen2_moe",), turned(lambda x, cos, sin: x)),
    Fault("rope-rows-permuted", ("rope-style", "weight-permuted"), ("qwen2", "llama"), rows_for_other_style),
    Fault("rope-theta-million", ("rope-theta",), ("qwen3", "qwen3_moe"), frequencies(plain(1e6))),
    Fault("rope-theta-subtle", ("rope-theta",), ("qwen2", "qwen2_moe"), frequencies(plain(10300.0))),
    Fault("rope-theta-500k", ("rope-theta",), ("qwen2",), frequencies(plain(5e5))),
    Fault("rope-yarn-missing", ("rope-scaling",), ("deepseek_v3", "deepseek_v2"), frequencies(plain(1e4))),
    Fault("rope-llama3-missing", ("rope-scaling",), ("llama",), frequencies(plain(1e4))),
    Fault("rope-linear-scaled", ("rope-scaling",), ("qwen3",), frequencies(lambda table, site: table / 4)),
    Fault("rope-attention-factor", ("rope-scaling",), ("deepseek_v3", "deepseek_v2"), attention_factor(1.12)),
    Fault("position-from-one", ("position-offset",), ("qwen3", "llama"), positions(lambda ids: ids + 1)),
    Fault("position-decode", ("position-offset",), ("qwen2", "deepseek_v3"), positions(lambda i: i + 1, decoding)),
    Fault("position-decode-back", ("position-offset",), ("qwen3_moe",), positions(lambda i: i - 1, decoding)),
    Fault("position-decode-restart", ("position-offset",), ("qwen3",), positions(torch.zeros_like, decoding)),
)
"""Planted in one layer unless named all."""
