"""Faults of MLPs, residuals, biases, outputs and the head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.drift.case import Fault, Plant
from benchmarks.drift.precision import coarse
from benchmarks.drift.site import Function, Site


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
        weight = change(head.weight.data.clone(), site).to(head.weight.dtype)
        head.weight = nn.Parameter(weight, requires_grad=False)
        return "lm_head"

    return plant


DENSE = ("qwen3", "llama", "qwen2")
FAULTS = (
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
