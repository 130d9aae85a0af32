"""Faults of norms."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.drift import layers
from benchmarks.drift.case import Fault, Plant
from benchmarks.drift.site import Site

INPUT, POST = "input_layernorm", "post_attention_layernorm"


def eps(value: float, name: str) -> Plant:
    def plant(site: Site) -> tuple[str, ...]:
        norm = site.module(name)
        setattr(norm, "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps", value)
        return names(site, name)

    return plant


def names(site: Site, name: str) -> tuple[str, ...]:
    """The norm; a port that adds the residual in the same Op does so in the layer, which is as right a place."""
    return (site.path(name), site.path("")) if name == POST and site.family.ported else (site.path(name),)


def normed(function: Callable[[Tensor, Tensor, float], Tensor], name: str) -> Plant:
    def plant(site: Site) -> tuple[str, ...]:
        layers.norm(site, name, function)
        return names(site, name)

    return plant


def left_out(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x


def unweighted(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return layers.rms(x, torch.ones_like(weight), eps)


def centred(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return layers.rms(x, 1 + weight, eps)


def not_centred(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return layers.rms(x, weight - 1, eps)


def cast_before_weight(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = layers.wide(x)
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def half_variance(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The variance of the first half of the dimensions."""
    y = layers.wide(x)
    variance = y[..., : y.shape[-1] // 2].square().mean(-1, keepdim=True)
    return (y * torch.rsqrt(variance + eps) * weight).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The mean subtracted, as LayerNorm does."""
    y = layers.wide(x)
    return layers.rms((y - y.mean(-1, keepdim=True)).to(x.dtype), weight, eps)


def narrow_variance(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The squares summed in bfloat16, one after another: a large one swallows those after it."""
    if x.dtype == torch.float64:
        return layers.rms(x, weight, eps)
    y = x.float()
    total = torch.zeros(*x.shape[:-1], 1, dtype=torch.bfloat16)
    for square in y.square().bfloat16().split(1, -1):
        total = total + square
    return (y * torch.rsqrt(total.float() / x.shape[-1] + eps) * weight).to(x.dtype)


FAULTS = (
    Fault("eps-1e-5", ("norm-eps",), ("qwen3", "llama"), eps(1e-5, INPUT), pairs=("fp32-fp32",)),
    Fault("eps-1e-3", ("norm-eps",), ("qwen3", "deepseek_v3", "qwen3_moe"), eps(1e-3, INPUT)),
    Fault("eps-1e-2-all", ("norm-eps",), ("qwen2", "deepseek_v2"), eps(1e-2, POST), "all"),
    Fault("eps-head-norm", ("norm-eps",), ("qwen3", "qwen3_moe"), eps(1e-2, "self_attn.k_norm")),
    Fault("eps-latent-norm", ("norm-eps",), ("deepseek_v3",), eps(1e-3, "self_attn.kv_a_layernorm")),
    Fault("norm-weight-plus-one", ("norm-zero-centred",), ("qwen3", "llama"), normed(centred, INPUT)),
    Fault("norm-weight-plus-one-all", ("norm-zero-centred",), ("deepseek_v3",), normed(centred, POST), "all"),
    Fault("norm-weight-not-plus-one", ("norm-zero-centred",), ("qwen3_next",), normed(not_centred, INPUT)),
    Fault("norm-final-plus-one", ("norm-zero-centred",), ("qwen2",), normed(centred, "model.norm")),
    Fault("norm-left-out", ("norm-missing",), ("qwen3", "qwen2_moe"), normed(left_out, INPUT)),
    Fault("norm-left-out-head", ("norm-missing",), ("qwen3", "qwen3_moe"), normed(left_out, "self_attn.q_norm")),
    Fault("norm-left-out-final", ("norm-missing",), ("llama",), normed(left_out, "model.norm")),
    Fault("norm-left-out-latent", ("norm-missing",), ("deepseek_v3",), normed(left_out, "self_attn.kv_a_layernorm")),
    Fault("norm-unweighted", ("norm-missing", "weight-stale"), ("qwen2",), normed(unweighted, POST)),
    Fault(
        "norm-cast-before-weight",
        ("norm-cast-order",),
        ("qwen3", "llama"),
        normed(cast_before_weight, INPUT),
        "all",
        pairs=("bf16-bf16",),
    ),
    Fault("norm-half-variance", ("unknown",), ("qwen3", "qwen3_moe"), normed(half_variance, "self_attn.k_norm")),
    Fault("norm-mean-subtracted", ("unknown",), ("qwen2",), normed(layer_norm, INPUT)),
    Fault(
        "norm-bf16-variance", ("low-precision", "norm-cast-order"), ("qwen3", "llama"), normed(narrow_variance, INPUT)
    ),
)
"""Planted in one layer unless named all."""
