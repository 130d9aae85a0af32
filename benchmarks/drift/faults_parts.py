"""Faults of norms, MLPs, residuals, biases, outputs and the head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.drift import layers
from benchmarks.drift.case import Fault, Plant
from benchmarks.drift.site import Function, Site

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


def coarse(bits: int) -> Callable[[Tensor], Tensor]:
    """Rounded to so many significant bits, whatever the dtype."""

    def change(x: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(x.double())
        return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent).to(x.dtype)

    return change


def narrowed(x: Tensor) -> Tensor:
    """Through the next narrower format: bfloat16 of float32, float8 of the half precisions; float64 as it is."""
    narrower = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float8_e4m3fn, torch.float16: torch.float8_e4m3fn}
    return x.to(narrower[x.dtype]).to(x.dtype) if x.dtype in narrower else x


def narrow_variance(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The squares summed in bfloat16, one after another: a large one swallows those after it."""
    if x.dtype == torch.float64:
        return layers.rms(x, weight, eps)
    y = x.float()
    total = torch.zeros(*x.shape[:-1], 1, dtype=torch.bfloat16)
    for square in y.square().bfloat16().split(1, -1):
        total = total + square
    return (y * torch.rsqrt(total.float() / x.shape[-1] + eps) * weight).to(x.dtype)


def activation(act: Callable[[Tensor], Tensor]) -> Plant:
    """Another activation in a dense MLP."""

    def plant(site: Site) -> str | tuple[str, ...]:
        mlp = site.module("mlp")
        if hasattr(mlp, "swiglu"):

            def gated(original: Any, gate_up: Tensor) -> Tensor:
                gate, up = gate_up.chunk(2, dim=-1)
                return act(gate) * up

            return site.op("mlp", "swiglu", gated)
        mlp.act_fn = Activation(act)
        return site.path("mlp"), site.path("mlp.act_fn")

    return plant


class Activation(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """The function's value."""
        return self.function(x)


def swapped_weights(site: Site) -> tuple[str, ...]:
    """gate and up loaded in each other's place."""
    _, gate = site.rows("mlp.gate_proj")
    path, up = site.rows("mlp.up_proj")
    kept = gate.clone()
    gate.copy_(up)
    up.copy_(kept)
    return path, site.rows("mlp.gate_proj")[0], site.path("mlp")


def swapped_op(site: Site) -> str:
    """A kernel that takes the second half for the gate."""

    def gated(original: Any, gate_up: Tensor) -> Any:
        return original(torch.cat(gate_up.chunk(2, dim=-1)[::-1], dim=-1))

    return site.op("mlp", "swiglu", gated)


def interleaved_op(site: Site) -> str:
    """A kernel that takes gate and up from alternating columns."""
    return site.op("mlp", "swiglu", lambda original, g: original(torch.cat([g[..., ::2], g[..., 1::2]], dim=-1)))


def swapped_forward(site: Site) -> str:
    """Upstream's MLP with the activation on the wrong side."""

    def forward(self: Any, original: Function, x: Tensor) -> Any:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))

    return site.forward("mlp", forward)


def residual(kind: str) -> Plant:
    """A decoder layer that leaves out the first or the second residual, or adds it after the norm."""

    def plant(site: Site) -> str:
        def forward(self: Any, original: Function, hidden_states: Tensor, **rest: Any) -> Tensor:
            attended = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **rest)[0]
            hidden = attended if kind == "first" else hidden_states + attended
            normed = self.post_attention_layernorm(hidden)
            mixed: Tensor = self.mlp(normed)
            kept: Tensor = {"first": hidden, "second": torch.zeros_like(mixed), "normed": normed}[kind]
            return kept + mixed

        return site.forward("", forward)

    return plant


def bias(change: Callable[[Tensor], Tensor], *projections: str) -> Plant:
    def plant(site: Site) -> tuple[str, ...]:
        return tuple({site.change(f"self_attn.{name}", change, "bias"): None for name in projections})

    return plant


def output(name: str, change: Callable[[Tensor], Tensor]) -> Plant:
    return lambda site: site.output(name, change)


def weight(name: str, change: Callable[[Tensor], Tensor]) -> Plant:
    return lambda site: site.change(name, change)


def branch(factor: float) -> Plant:
    """The layer scales what the MLP adds."""

    def plant(site: Site) -> tuple[str, ...]:
        def forward(self: Any, original: Function, hidden_states: Tensor, **rest: Any) -> Any:
            hidden = hidden_states + self.self_attn(hidden_states=self.input_layernorm(hidden_states), **rest)[0]
            mixed: Tensor = self.mlp(self.post_attention_layernorm(hidden))
            return hidden + factor * mixed

        return (site.forward("", forward),)

    return plant


def partial_sum(name: str) -> Plant:
    """One of two ranks' share of a row-parallel product: the sum over ranks is missing."""

    def plant(site: Site) -> str:
        def forward(self: Any, original: Function, x: Tensor) -> Any:
            half = x.clone()
            half[..., x.shape[-1] // 2 :] = 0
            return original(half)

        return site.forward(name, forward)

    return plant


def untied(change: Callable[[Tensor, Site], Tensor]) -> Plant:
    """lm_head with weights of its own where it should have the embedding's."""

    def plant(site: Site) -> str:
        head = site.module("lm_head")
        head.weight = nn.Parameter(change(head.weight.data.clone(), site), requires_grad=False)
        return "lm_head"

    return plant


def at_most(limit: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x.clamp(-limit, limit)


DENSE = ("qwen3", "llama", "qwen2")
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
    Fault("norm-bf16-variance", ("low-precision",), ("qwen3", "llama"), normed(narrow_variance, INPUT)),
    Fault("act-gelu", ("activation",), ("qwen3", "llama"), activation(F.gelu), layers="dense"),
    Fault("act-gelu-tanh-all", ("activation",), ("qwen2",), activation(lambda x: F.gelu(x, approximate="tanh")), "all"),
    Fault(
        "act-quick",
        ("activation",),
        ("qwen3", "deepseek_v3"),
        activation(lambda x: x * torch.sigmoid(1.702 * x)),
        layers="dense",
    ),
    Fault("act-relu", ("activation",), ("llama",), activation(F.relu)),
    Fault(
        "act-clamped", ("activation", "overflow", "unknown"), ("qwen3",), activation(lambda x: F.silu(x).clamp(max=1.0))
    ),
    Fault("gate-up-weights", ("gate-up-swapped",), ("qwen3", "llama", "deepseek_v3"), swapped_weights, layers="dense"),
    Fault("gate-up-op-all", ("gate-up-swapped",), ("qwen2",), swapped_op, "all"),
    Fault("gate-up-forward", ("gate-up-swapped",), ("llama",), swapped_forward),
    Fault("gate-up-interleaved", ("gate-up-swapped", "weight-permuted"), ("qwen3",), interleaved_op),
    Fault("residual-first", ("residual-missing",), ("qwen3", "llama"), residual("first")),
    Fault("residual-second", ("residual-missing",), ("qwen2", "deepseek_v2"), residual("second")),
    Fault("residual-normed", ("residual-missing",), ("deepseek_v3", "qwen3_moe"), residual("normed")),
    Fault("bias-none-all", ("bias-missing",), ("qwen2",), bias(torch.zeros_like, "q_proj", "k_proj", "v_proj"), "all"),
    Fault("bias-none-v", ("bias-missing",), ("qwen2", "qwen2_moe"), bias(torch.zeros_like, "v_proj")),
    Fault("bias-twice", ("bias-doubled",), ("qwen2", "qwen2_moe"), bias(lambda b: 2 * b, "q_proj")),
    Fault("bias-twice-all", ("bias-doubled",), ("qwen2_moe",), bias(lambda b: 2 * b, "k_proj"), "all"),
    Fault("bias-eight-values", ("low-precision",), ("qwen2",), bias(coarse(3), "q_proj")),
    Fault(
        "ratio-o-proj", ("constant-ratio",), ("qwen3", "deepseek_v2"), weight("self_attn.o_proj", lambda w: 1.02 * w)
    ),
    Fault("ratio-down-proj", ("constant-ratio",), ("llama",), output("mlp.down_proj", lambda x: 0.9 * x)),
    Fault("ratio-branch", ("constant-ratio",), ("qwen3",), branch(1.1)),
    Fault(
        "ratio-embedding",
        ("constant-ratio",),
        ("qwen2", "deepseek_v3"),
        output("model.embed_tokens", lambda x: 128**0.5 * x),
    ),
    Fault("offset-mlp", ("constant-offset",), ("qwen3", "llama"), output("mlp", lambda x: x + 0.05)),
    Fault("offset-o-proj-all", ("constant-offset",), ("qwen2",), output("self_attn.o_proj", lambda x: x - 0.02), "all"),
    Fault("reduction-none-o", ("reduction-missing",), ("qwen3", "llama"), partial_sum("self_attn.o_proj")),
    Fault("reduction-none-down-all", ("reduction-missing",), ("qwen2",), partial_sum("mlp.down_proj"), "all"),
    Fault(
        "reduction-twice-o",
        ("reduction-doubled", "constant-ratio"),
        ("deepseek_v3",),
        output("self_attn.o_proj", lambda x: 2 * x),
    ),
    Fault(
        "reduction-twice-down",
        ("reduction-doubled", "constant-ratio"),
        ("qwen2",),
        output("mlp.down_proj", lambda x: 4 * x),
    ),
    Fault("head-untied", ("tied-embedding",), ("qwen3", "llama"), untied(lambda w, site: 0.05 * site.draw(*w.shape))),
    Fault(
        "head-untied-early",
        ("tied-embedding", "low-precision", "weight-stale"),
        ("qwen3",),
        untied(lambda w, site: w + 0.01 * w.std() * site.draw(*w.shape)),
    ),
    Fault("logits-halved", ("logit-scale", "constant-ratio"), ("qwen2", "llama"), output("lm_head", lambda x: 0.5 * x)),
    Fault(
        "logits-scaled", ("logit-scale", "constant-ratio"), ("deepseek_v3",), output("lm_head", lambda x: x / 128**0.5)
    ),
    Fault(
        "logits-capped", ("unknown", "logit-scale"), ("qwen3_moe",), output("lm_head", lambda x: 5 * torch.tanh(x / 5))
    ),
)
"""Planted in one layer unless named all."""
