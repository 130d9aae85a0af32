"""Planted faults by name: where, how, and the cause kind that a report must name."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from small_modules import ROTARY
from torch import nn
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from porter.alignment.hypotheses.rope_style import turn_half, turn_interleaved
from porter.alignment.hypotheses.routing import altered, gate_of
from porter.alignment.hypotheses.surgery import map_output, rebind_forward, rebind_globals

Plant = Callable[[Any], object]


@dataclass(frozen=True)
class Fault:
    """One planted fault."""

    kind: str
    family: str
    path: str
    plant: Plant


def rope(name: str, turn: Callable[..., Any]) -> Plant:
    def rotate(q: Any, k: Any, cos: Any, sin: Any, **_: Any) -> Any:
        return turn(q, cos.unsqueeze(1), sin.unsqueeze(1)), turn(k, cos.unsqueeze(1), sin.unsqueeze(1))

    return lambda module: rebind_globals(module, {name: rotate})


def gate(path: str = "", **options: Any) -> Plant:
    def plant(module: nn.Module) -> None:
        router = module.get_submodule(path)
        changed = altered(gate_of(router), **options)
        rebind_forward(router, lambda self, hidden_states: changed(self, hidden_states))

    return plant


def without_first_residual(layer: nn.Module) -> None:
    def forward(self: Any, hidden_states: Any, **rest: Any) -> Any:
        hidden, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **rest)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    rebind_forward(layer, forward)


def without_second_residual(layer: nn.Module) -> None:
    def forward(self: Any, hidden_states: Any, **rest: Any) -> Any:
        hidden = hidden_states + self.self_attn(hidden_states=self.input_layernorm(hidden_states), **rest)[0]
        return self.mlp(self.post_attention_layernorm(hidden))

    rebind_forward(layer, forward)


def residual_after_norm(layer: nn.Module) -> None:
    def forward(self: Any, hidden_states: Any, **rest: Any) -> Any:
        hidden = hidden_states + self.self_attn(hidden_states=self.input_layernorm(hidden_states), **rest)[0]
        normed = self.post_attention_layernorm(hidden)
        return normed + self.mlp(normed)

    rebind_forward(layer, forward)


def tiled_heads(attention: nn.Module) -> None:
    original = qwen3.eager_attention_forward
    names = {**original.__globals__, "repeat_kv": lambda states, repeats: states.repeat(1, repeats, 1, 1)}
    rebind_globals(attention, {"eager_attention_forward": types.FunctionType(original.__code__, names, "eager")})


def set_mask(rule: Callable[[Any, Any], Any]) -> Plant:
    def plant(attention: nn.Module) -> None:
        inner = type(attention).forward

        def forward(self: Any, hidden_states: Any, attention_mask: Any = None, **rest: Any) -> Any:
            if attention_mask is not None:
                place = torch.arange(attention_mask.shape[-1])
                seen = rule(place[:, None], place[None])
                attention_mask = torch.zeros_like(attention_mask).masked_fill(~seen, torch.finfo(torch.float64).min)
            return inner(self, hidden_states, attention_mask=attention_mask, **rest)

        rebind_forward(attention, forward)

    return plant


def shifted_positions(amount: int, prefill_too: bool) -> Plant:
    def plant(rotary: nn.Module) -> None:
        inner = type(rotary).forward

        def forward(self: Any, x: Any, position_ids: Any) -> Any:
            moved = prefill_too or position_ids.shape[-1] == 1
            return inner(self, x, position_ids + amount if moved else position_ids)

        rebind_forward(rotary, forward)

    return plant


def setting(name: str, value: Any, path: str = "") -> Plant:
    return lambda module: setattr(module.get_submodule(path), name, value)


def scaled(name: str, factor: float) -> Plant:
    return lambda module: module.get_parameter(name).mul_(factor)


def written(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    return lambda module: module.get_parameter(name).copy_(change(module.get_parameter(name).clone()))


def exchanged(first: str, second: str) -> Plant:
    def plant(module: nn.Module) -> None:
        a, b = module.get_parameter(first), module.get_parameter(second)
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)

    return plant


def quantized(bits: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(weight: torch.Tensor) -> torch.Tensor:
        step = weight.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
        return (weight / step).round() * step

    return change


def shuffled(dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    order = torch.Generator().manual_seed(5)
    return lambda weight: weight.index_select(dim, torch.randperm(weight.shape[dim], generator=order))


GATE, UP, NORM, ATTENTION = "mlp.gate", "mlp.up_proj", "input_layernorm", "self_attn"
FAULTS: dict[str, Fault] = {
    "rope interleaved for half": Fault(
        "rope-style", "qwen3", ATTENTION, rope("apply_rotary_pos_emb", turn_interleaved)
    ),
    "rope half for interleaved": Fault(
        "rope-style", "deepseek_v3", ATTENTION, rope("apply_rotary_pos_emb_interleave", turn_half)
    ),
    "rope left out": Fault("rope-style", "qwen2", ATTENTION, rope("apply_rotary_pos_emb", lambda x, cos, sin: x)),
    "rows of q permuted between rope styles": Fault(
        "rope-style",
        "qwen3",
        "self_attn.q_proj",
        written("weight", lambda w: w.view(4, 2, 8, 48).transpose(1, 2).reshape(64, 48)),
    ),
    "gate and up exchanged": Fault("gate-up-swapped", "qwen3", "mlp", exchanged("gate_proj.weight", "up_proj.weight")),
    "gate and up exchanged in the experts": Fault(
        "gate-up-swapped", "deepseek_v3", "mlp.experts", written("gate_up_proj", lambda w: w.roll(24, 1))
    ),
    "gelu": Fault("activation", "qwen3", "mlp", setting("act_fn", nn.GELU())),
    "relu in the experts": Fault("activation", "deepseek_v3", "mlp.experts", setting("act_fn", nn.ReLU())),
    "eps a thousand times too large": Fault("norm-eps", "qwen3", NORM, setting("variance_epsilon", 1e-3)),
    "eps inside a layer": Fault("norm-eps", "qwen3", "", setting("variance_epsilon", 1e-4, "post_attention_layernorm")),
    "eps of k_norm": Fault("norm-eps", "qwen3", ATTENTION, setting("variance_epsilon", 3e-4, "k_norm")),
    "weight plus one": Fault("norm-zero-centred", "qwen3", NORM, written("weight", lambda w: w + 1)),
    "norm left out": Fault(
        "norm-missing", "qwen3", NORM, lambda m: rebind_forward(m, lambda self, hidden_states: hidden_states)
    ),
    "attention scale by a little": Fault("attention-scale", "qwen3", ATTENTION, setting("scaling", 0.25 * 1.03)),
    "yarn mscale left out": Fault("attention-scale", "deepseek_v3", ATTENTION, setting("scaling", 24**-0.5)),
    "bias of k left out": Fault("bias-missing", "qwen2", "self_attn.k_proj", written("bias", torch.zeros_like)),
    "bias of v left out, seen in the attention": Fault(
        "bias-missing", "qwen2", ATTENTION, setting("bias", None, "v_proj")
    ),
    "bias doubled": Fault("bias-doubled", "qwen2", "self_attn.k_proj", scaled("bias", 2.0)),
    "bias of k halved": Fault("constant-ratio", "qwen2", "self_attn.k_proj", scaled("bias", 0.5)),
    "o_proj times 1.02": Fault("constant-ratio", "qwen3", "self_attn.o_proj", scaled("weight", 1.02)),
    "output times 1.5": Fault("constant-ratio", "qwen3", "mlp", lambda m: map_output(m, lambda out: 1.5 * out)),
    "output plus a constant": Fault("constant-offset", "qwen3", "mlp", lambda m: map_output(m, lambda out: out + 0.01)),
    "branch times 1.02": Fault("constant-ratio", "qwen3", "", lambda m: map_output(m.mlp, lambda out: 1.02 * out)),
    "square weight transposed": Fault(
        "weight-transposed", "qwen2", "self_attn.q_proj", written("weight", lambda w: w.t())
    ),
    "oblong weight transposed": Fault(
        "weight-transposed", "qwen3", UP, written("weight", lambda w: w.t().reshape(w.shape))
    ),
    "rows permuted": Fault("weight-permuted", "qwen3", UP, written("weight", shuffled(0))),
    "columns permuted": Fault("weight-permuted", "qwen3", UP, written("weight", shuffled(1))),
    "never loaded": Fault("weight-stale", "qwen3", UP, written("weight", torch.zeros_like)),
    "quantized to five bits": Fault("low-precision", "qwen3", UP, written("weight", quantized(5))),
    "rounded to bfloat16": Fault(
        "low-precision", "qwen3", UP, written("weight", lambda w: w.to(torch.bfloat16).double())
    ),
    "scale per row left out": Fault(
        "scale-missing", "qwen3", UP, written("weight", lambda w: w / w.abs().amax(-1, keepdim=True))
    ),
    "query heads permuted": Fault(
        "head-permutation",
        "qwen3",
        "self_attn.q_proj",
        written("weight", lambda w: w.view(4, 16, 48).roll(1, 0).reshape(64, 48)),
    ),
    "key heads permuted": Fault(
        "kv-head-order",
        "qwen3",
        "self_attn.k_proj",
        written("weight", lambda w: w.view(2, 16, 48).flip(0).reshape(32, 48)),
    ),
    "key/value heads tiled": Fault("kv-head-order", "qwen3", ATTENTION, tiled_heads),
    "router bias left out": Fault("router-bias", "deepseek_v3", GATE, gate(bias_selects=False)),
    "router bias leaked": Fault("router-bias", "deepseek_v3", GATE, gate(bias_weighs=True)),
    "router bias leaked, seen in the mixture": Fault(
        "router-bias", "deepseek_v3", "mlp", gate("gate", bias_weighs=True)
    ),
    "router not renormalised": Fault("router-renormalisation", "deepseek_v3", GATE, gate(renormalize=False)),
    "router scale left out": Fault("router-scale", "deepseek_v3", GATE, gate(scale=1.0)),
    "router groups by their best": Fault("router-groups", "deepseek_v3", GATE, gate(group_score="max")),
    "router without groups": Fault("router-groups", "deepseek_v3", GATE, gate(groups=1)),
    "shared expert left out": Fault(
        "shared-expert", "deepseek_v3", "mlp", lambda m: map_output(m.shared_experts, torch.zeros_like)
    ),
    "experts shifted": Fault(
        "expert-permutation", "deepseek_v3", "mlp.experts", written("gate_up_proj", lambda w: w.roll(1, 0))
    ),
    "first residual left out": Fault("residual-missing", "qwen3", "", without_first_residual),
    "second residual left out": Fault("residual-missing", "qwen2", "", without_second_residual),
    "residual after the norm": Fault("residual-missing", "deepseek_v3", "", residual_after_norm),
    "no causal mask": Fault("attention-mask", "qwen3", ATTENTION, set_mask(lambda q, k: k <= k.max())),
    "mask off by one": Fault("attention-mask", "qwen2", ATTENTION, set_mask(lambda q, k: k <= q + 1)),
    "stray sliding window": Fault("sliding-window", "qwen3", ATTENTION, set_mask(lambda q, k: (k <= q) & (k > q - 4))),
    "another theta": Fault("rope-theta", "qwen3", ROTARY, setting("inv_freq", 1e6 ** -(torch.arange(8).double() / 8))),
    "an odd theta": Fault(
        "rope-theta", "qwen3", ROTARY, setting("inv_freq", 23456.0 ** -(torch.arange(8).double() / 8))
    ),
    "yarn left out": Fault(
        "rope-scaling",
        "deepseek_v3",
        ROTARY,
        setting("inv_freq", 1e4 ** -(torch.arange(4).double() / 4)),
    ),
    "decode position off by one": Fault("position-offset", "qwen2", ROTARY, shifted_positions(1, prefill_too=False)),
    "position off by one": Fault("position-offset", "qwen3", ROTARY, shifted_positions(1, prefill_too=True)),
    "nan": Fault("nan-origin", "qwen3", "mlp", lambda m: map_output(m, lambda out: out.log())),
    "overflow": Fault(
        "overflow", "qwen3", NORM, lambda m: map_output(m, lambda out: out.masked_fill(out > 1, float("inf")))
    ),
    "something else": Fault("unknown", "qwen3", "mlp", lambda m: map_output(m, lambda out: out + out.roll(1, -1) ** 2)),
}
