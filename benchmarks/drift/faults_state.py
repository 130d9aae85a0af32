"""Faults of state and of numbers: recurrent state, padding, precision, overflow, NaN, nondeterminism; and pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.drift import (
    faults_attention,
    faults_moe,
    faults_norms,
    faults_parts,
    faults_rope,
    faults_weights,
    layers,
)
from benchmarks.drift.case import Fault, Plant
from benchmarks.drift.layers import Attend
from benchmarks.drift.precision import coarse, narrowed
from benchmarks.drift.site import Function, Site

NET = "linear_attn"


def state(change: Callable[[Tensor], Tensor]) -> Plant:
    """The recurrent state as it is stored, changed."""

    def plant(site: Site) -> str:
        def forward(self: Any, original: Function, *args: Any, cache: Any = None, **kwargs: Any) -> Any:
            return original(*args, cache=None if cache is None else WrongState(cache, change), **kwargs)

        return site.forward(NET, forward)

    return plant


class WrongState:
    """A cache that stores another recurrent state than it is given."""

    def __init__(self, inner: Any, change: Callable[[Tensor], Tensor]) -> None:
        self.inner, self.change = inner, change

    def update_recurrent_state(self, new: Tensor, layer: int, *rest: Any, **more: Any) -> Any:
        """Store `change(new)`."""
        return self.inner.update_recurrent_state(self.change(new), layer, *rest, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def conv_state_lost(site: Site) -> str:
    """In decode, the convolution starts from zeros."""

    def update(hidden: Tensor, conv_state: Tensor, weight: Tensor, bias: Any = None, activation: Any = None) -> Tensor:
        kept = torch.cat([conv_state, hidden], -1)[..., -conv_state.shape[-1] :]
        conv_state.copy_(kept)
        padded = F.pad(hidden, (weight.shape[-1] - 1, 0))
        return F.silu(F.conv1d(padded, weight.unsqueeze(1), bias, groups=hidden.shape[1]))

    return site.global_function(NET, causal_conv1d_update=update)


def convolved(left: Callable[[int], int]) -> Plant:
    """A convolution padded otherwise than causally."""

    def plant(site: Site) -> str:
        def convolve(hidden: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **rest: Any) -> Tensor:
            width = weight.shape[-1] - 1
            padded = F.pad(hidden, (left(width), width - left(width)))
            return F.silu(F.conv1d(padded, weight.unsqueeze(1), bias, groups=hidden.shape[1]))

        return site.global_function(NET, causal_conv1d_fn=convolve)

    return plant


def padding_seen(site: Site) -> str:
    """Attention that looks at the padding on the left."""
    return layers.attention(site, Attend(ignore_mask=True))


def positions_from_padding(site: Site) -> str:
    """Positions counted from the start of the row, padding included."""

    def forward(self: Any, original: Function, x: Tensor, position_ids: Tensor) -> Any:
        if position_ids.shape[-1] > 1:
            position_ids = torch.arange(position_ids.shape[-1], device=x.device).expand_as(position_ids)
        return original(x, position_ids)

    return site.forward("model.rotary_emb", forward)


def narrow_linear(name: str) -> Plant:
    """A product whose result goes through the next narrower format."""
    return lambda site: site.output(name, narrowed)


def chunks_in_half(name: str) -> Plant:
    """A product accumulated in bfloat16, eight columns at a time."""

    def plant(site: Site) -> str:
        def forward(self: Any, original: Function, x: Tensor) -> Tensor:
            if x.dtype == torch.float64:
                out: Tensor = original(x)
                return out
            parts = zip(x.split(8, -1), self.weight.to(x.dtype).split(8, -1), strict=True)
            total = torch.zeros(*x.shape[:-1], len(self.weight), dtype=torch.bfloat16)
            for given, weight in parts:
                total = total + F.linear(given, weight).bfloat16()
            return total.to(x.dtype)

        return site.forward(name, forward)

    return plant


def overflowing(name: str, limit: float) -> Plant:
    """Values beyond a narrow format's range become infinite."""
    return lambda site: site.output(name, lambda x: torch.where(x.abs() > limit * x.abs().max(), torch.inf * x, x))


def saturating(name: str, share: float) -> Plant:
    return lambda site: site.output(
        name, lambda x: x.clamp(-share * float(x.abs().max()), share * float(x.abs().max()))
    )


def not_a_number(name: str) -> Plant:
    return lambda site: site.output(name, lambda x: x / (x > x.min()))


def noisy(name: str, size: float) -> Plant:
    """A race: every call errs differently."""
    return lambda site: site.output(name, lambda x: x * (1 + size * torch.randn_like(x)))


def dropped(name: str) -> Plant:
    """Dropout left on."""
    return lambda site: site.output(name, lambda x: F.dropout(x, 0.1, training=True))


def other(function: Callable[[Tensor], Tensor], name: str) -> Plant:
    return lambda site: site.output(name, function)


SINGLE = (
    Fault("state-bf16", ("state-dtype",), ("qwen3_next",), state(lambda s: s.bfloat16().to(s.dtype)), "one", "linear"),
    Fault("state-fp16-all", ("state-dtype",), ("qwen3_next",), state(lambda s: s.half().to(s.dtype)), "all", "linear"),
    Fault("state-coarse", ("state-dtype", "low-precision"), ("qwen3_next",), state(coarse(4)), "one", "linear"),
    Fault("state-reset", ("state-reset",), ("qwen3_next",), state(torch.zeros_like), "one", "linear"),
    Fault("state-reset-all", ("state-reset",), ("qwen3_next",), state(torch.zeros_like), "all", "linear"),
    Fault(
        "state-of-another-row", ("state-reset", "unknown"), ("qwen3_next",), state(lambda s: s.flip(0)), "one", "linear"
    ),
    Fault("conv-state-lost", ("state-reset", "conv-padding"), ("qwen3_next",), conv_state_lost, "one", "linear"),
    Fault("conv-centred", ("conv-padding",), ("qwen3_next",), convolved(lambda width: width // 2), "one", "linear"),
    Fault("conv-ahead", ("conv-padding",), ("qwen3_next",), convolved(lambda width: 0), "all", "linear"),
    Fault("conv-off-by-one", ("conv-padding",), ("qwen3_next",), convolved(lambda width: width - 1), "one", "linear"),
    Fault("padding-seen", ("padding-rows", "attention-mask"), ("qwen3", "llama"), padding_seen, golden="padded"),
    Fault("padding-seen-all", ("padding-rows", "attention-mask"), ("qwen3_moe",), padding_seen, "all", golden="padded"),
    Fault(
        "padding-positions",
        ("padding-rows", "position-offset"),
        ("qwen3", "llama"),
        positions_from_padding,
        golden="padded",
    ),
    Fault("precision-down-proj", ("low-precision",), ("qwen3", "qwen2"), narrow_linear("mlp.down_proj")),
    Fault("precision-o-proj-all", ("low-precision",), ("llama",), narrow_linear("self_attn.o_proj"), "all"),
    Fault("precision-accumulate", ("low-precision",), ("qwen3", "llama"), chunks_in_half("mlp.down_proj")),
    Fault("precision-scores-kernel", ("low-precision",), ("qwen3", "qwen2"), faults_attention.kernel_half_scores),
    Fault("precision-embedding", ("low-precision",), ("qwen2_moe",), narrow_linear("model.embed_tokens")),
    Fault("overflow-mlp", ("overflow", "nan-origin"), ("qwen3", "llama"), overflowing("mlp", 0.8)),
    Fault("overflow-saturated", ("overflow",), ("qwen2",), saturating("mlp.down_proj", 0.5)),
    Fault("overflow-o-proj", ("overflow", "nan-origin"), ("deepseek_v3",), overflowing("self_attn.o_proj", 0.9)),
    Fault(
        "nan-mlp", ("nan-origin", "overflow"), ("qwen3", "deepseek_v2"), not_a_number("mlp.down_proj"), layers="dense"
    ),
    Fault("nan-norm", ("nan-origin", "overflow"), ("llama",), not_a_number("input_layernorm")),
    Fault("nan-head", ("nan-origin", "overflow"), ("qwen2",), not_a_number("lm_head")),
    Fault("race-mlp", ("nondeterminism",), ("qwen3", "llama"), noisy("mlp", 0.02)),
    Fault("race-o-proj-all", ("nondeterminism",), ("qwen2",), noisy("self_attn.o_proj", 0.05), "all"),
    Fault("dropout-on", ("nondeterminism",), ("qwen3_moe",), dropped("self_attn.o_proj")),
    Fault("other-square", ("unknown",), ("qwen3",), other(lambda x: x + 0.1 * x.roll(1, -1) ** 2, "mlp")),
    Fault("other-tanh", ("unknown",), ("llama",), other(torch.tanh, "self_attn.o_proj")),
)


def pair(first: Fault, second: Fault, *families: str) -> Fault:
    """Two faults in one candidate."""
    return dataclasses.replace(
        first,
        id=f"{first.id}+{second.id}",
        families=families,
        second=second,
        pairs=tuple(each for each in first.pairs if each in second.pairs),
        golden=first.golden or second.golden,
    )


def named(id: str) -> Fault:
    """The single fault of that id."""
    return next(fault for fault in ALL_SINGLE if fault.id == id)


ALL_SINGLE = (
    *faults_rope.FAULTS,
    *faults_attention.FAULTS,
    *faults_norms.FAULTS,
    *faults_parts.FAULTS,
    *faults_weights.FAULTS,
    *faults_moe.FAULTS,
    *SINGLE,
)
DOUBLES = (
    ("rope-interleaved", "act-gelu", "qwen3"),
    ("scale-subtle", "ratio-o-proj", "qwen3"),
    ("kv-heads-tiled", "residual-second", "llama"),
    ("bias-none-v", "transposed-square", "qwen2"),
    ("router-not-renormalised", "shared-none", "deepseek_v3"),
    ("rope-yarn-missing", "router-scale-none", "deepseek_v3"),
    ("norm-left-out", "experts-rolled", "qwen3_moe"),
    ("state-reset", "shared-ungated", "qwen3_next"),
    ("eps-1e-3", "logits-halved", "llama"),
    ("mask-next-token", "gate-up-weights", "llama"),
    ("norm-weight-plus-one", "precision-down-proj", "qwen3"),
    ("position-decode", "cache-one-behind", "qwen2"),
)
FAULTS = (*ALL_SINGLE, *(pair(named(first), named(second), family) for first, second, family in DOUBLES))
"""Every planted fault."""
