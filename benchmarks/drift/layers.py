"""Attention, routing, experts and norms as a bad port would write them: right, but for one twist."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.drift.site import Function, Site

Change = Callable[[Tensor], Tensor]


def wide(tensor: Tensor) -> Tensor:
    """At least float32, as the originals compute their softmax and norms."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


@dataclass(frozen=True)
class Attend:
    """Grouped-query attention with a twist: what may be seen [.., S, T] (bool), scores and probabilities changed."""

    visible: Change = lambda mask: mask
    scores: Change = lambda scores: scores
    normalise: Change = lambda scores: scores.softmax(dim=-1)
    tiled: bool = False
    ignore_mask: bool = False
    window: Callable[[int | None], int | None] = lambda window: window

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, window: int | None
    ) -> Tensor:
        """[B, S, Hq, Dv]; `mask` None is causal, else bool or additive."""
        repeats = query.shape[1] // key.shape[1]
        if self.tiled:
            key, value = key.repeat(1, repeats, 1, 1), value.repeat(1, repeats, 1, 1)
        else:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        visible = self.visible(self._visible(query.shape[2], key.shape[2], mask, self.window(window), query.device))
        scores = self.scores(wide(query @ key.transpose(2, 3)) * scaling).masked_fill(~visible, -torch.inf)
        weights = self.normalise(scores).nan_to_num(0.0)
        return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous()

    def _visible(self, queries: int, keys: int, mask: Tensor | None, window: int | None, device: Any) -> Tensor:
        if mask is not None and not self.ignore_mask:
            seen = mask if mask.dtype == torch.bool else mask > -1e30
            if seen.shape[-1] >= keys:
                return seen[..., :keys]
        place = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
        return (place >= 0) & (place < (window or keys + 1))


def attention(site: Site, attend: Attend, name: str = "self_attn") -> str:
    """Make a layer's attention the given one, in every form."""
    module = site.module(name)
    if hasattr(module, "absorbed_attention"):
        for op in ("absorbed_attention", "expanded_attention"):
            site.op(name, op, lambda original, *rest: latent(attend, *rest))
        return site.path(name)
    if hasattr(module, "attention"):
        return site.op(name, "attention", lambda original, *rest: attend(*rest))

    def eager(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **rest: Any) -> Any:
        return attend(query, key, value, mask, scaling, rest.get("sliding_window")), None

    return site.global_function(name, eager_attention_forward=eager)


def latent(
    attend: Attend, query_nope: Tensor, query_rope: Tensor, latents: Tensor, key_rope: Tensor, weight: Tensor,
    mask: Tensor | None, scaling: float,
) -> Tensor:  # fmt: skip
    """Latent attention by expanding the latents; `weight` has, per head, N key rows and then V value rows."""
    heads, own = query_nope.shape[1], query_nope.shape[-1]
    rows, tokens = weight.shape[0] // heads, latents.shape[2]
    expanded = (latents[:, 0] @ weight.t()).view(latents.shape[0], tokens, heads, rows).transpose(1, 2)
    key = torch.cat([expanded[..., :own], key_rope.expand(-1, heads, -1, -1)], dim=-1)
    query = torch.cat([query_nope, query_rope], dim=-1)
    return attend(query, key, expanded[..., own:].contiguous(), mask, scaling, None)


def rope(
    site: Site, turn: Callable[[Tensor, Tensor, Tensor], Tensor], name: str = "self_attn", keys: bool = True
) -> str:
    """Rotate queries (and keys) with `turn(x [B, H, S, R], cos [B, 1, S, R], sin)`; further dimensions pass through."""

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated = cos.shape[-1]
        return torch.cat([turn(x[..., :rotated], cos.unsqueeze(1), sin.unsqueeze(1)), x[..., rotated:]], dim=-1)

    def both(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, original: Function) -> tuple[Tensor, Tensor]:
        return rotate(query, cos, sin), rotate(key, cos, sin) if keys else original(query, key, cos, sin)[1]

    module = site.module(name)
    if hasattr(module, "rope"):
        return site.op(name, "rope", lambda original, q, k, cos, sin: both(q, k, cos, sin, original))
    import inspect

    known: Any = inspect.unwrap(type(module).forward)
    before = known.__globals__["apply_rotary_pos_emb"]
    return site.global_function(name, apply_rotary_pos_emb=lambda q, k, cos, sin: both(q, k, cos, sin, before))


def half_turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (i, i + R/2)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def interleaved_turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (2i, 2i + 1), left in place."""
    half = x.shape[-1] // 2
    even, odd, cos, sin = x[..., ::2], x[..., 1::2], cos[..., :half], sin[..., :half]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


def backward_turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The half style turned the other way."""
    return half_turn(x, cos, -sin)


def norm(site: Site, name: str, function: Callable[[Tensor, Tensor, float], Tensor]) -> str:
    """Make a norm compute `function(x, weight, eps)`, `weight` as it multiplies (1 + w where zero-centred)."""
    module = site.module(name)
    if hasattr(module, "rms_norm"):
        site.op(name, "rms_norm", lambda original, x, weight, eps: function(x, weight, eps))
        add: Function = lambda original, x, residual, weight, eps: (function(x + residual, weight, eps), x + residual)  # noqa: E731
        return site.op(name, "add_rms_norm", add)
    centred = not hasattr(module, "variance_epsilon")

    def forward(self: Any, original: Function, x: Tensor) -> Tensor:
        return function(x, 1 + self.weight if centred else self.weight, self.eps if centred else self.variance_epsilon)

    return site.forward(name, forward)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm as it should be, rounding once."""
    y = wide(x)
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * wide(weight)).to(x.dtype)


def mix(hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, act: Change = F.silu) -> Tensor:
    """Routed experts, one after another, accumulated in float32 at least."""
    out = wide(torch.zeros_like(hidden))
    for expert in range(gate_up.shape[0]):
        token, place = torch.where(index == expert)
        if token.numel():
            gate, up = F.linear(hidden[token], gate_up[expert]).chunk(2, dim=-1)
            mixed = F.linear(act(gate) * up, down[expert]) * weights[token, place, None]
            out.index_add_(0, token, mixed.to(out.dtype))
    return out.to(hidden.dtype)


def experts(site: Site, function: Function) -> str:
    """Make a layer's experts `function(hidden, index, weights, gate_up, down)`."""
    module = site.module("mlp.experts")
    if hasattr(module, "experts"):
        return site.op("mlp.experts", "experts", lambda original, *rest: function(*rest))

    def forward(self: Any, original: Function, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = function(hidden, index, weights, self.gate_up_proj, self.down_proj)
        return out

    return site.forward("mlp.experts", forward)


@dataclass(frozen=True)
class Route:
    """A router with settings other than the model's own; None leaves one as it is."""

    bias_selects: bool = True
    bias_weighs: bool = False
    renormalise: bool | None = None
    scale: float | None = None
    group_score: str = "top2"
    groups: int | None = None
    chosen_groups: int | None = None
    dtype: torch.dtype | None = None
    stored: torch.dtype | None = None
    masked_to: float = 0.0

    def sigmoid(
        self, hidden: Tensor, weight: Tensor, bias: Tensor, top_k: int, groups: int, chosen: int, renormalise: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """DeepSeek-V3's."""
        logits = self._logits(hidden, weight, wide(hidden).dtype)
        scores = logits.sigmoid()
        choice = scores + bias if self.bias_selects else scores
        groups, chosen = self.groups or groups, self.chosen_groups or chosen
        grouped = choice.view(len(choice), groups, -1)
        best = grouped.topk(2, dim=-1)[0].sum(-1) if self.group_score == "top2" else grouped.amax(-1)
        kept = torch.zeros_like(best).scatter_(1, best.topk(min(chosen, groups), dim=-1)[1], 1.0).bool()
        index = grouped.masked_fill(~kept[..., None], self.masked_to).flatten(1).topk(top_k, dim=-1)[1]
        weights = (choice if self.bias_weighs else scores).gather(1, index)
        if renormalise if self.renormalise is None else self.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * (scale if self.scale is None else self.scale), index

    def softmax(self, hidden: Tensor, weight: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Qwen's."""
        logits = self._logits(hidden, weight, hidden.dtype)
        weights, index = wide(logits).softmax(-1).topk(top_k, dim=-1)
        if renormalise if self.renormalise is None else self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, (weights * (1.0 if self.scale is None else self.scale)).to(logits.dtype), index

    def _logits(self, hidden: Tensor, weight: Tensor, usual: torch.dtype) -> Tensor:
        if self.dtype is not None and hidden.dtype != torch.float64:
            return F.linear(hidden.to(self.dtype), weight.to(self.dtype)).to(usual)
        logits = F.linear(hidden.to(usual), weight.to(usual))
        return logits.to(self.stored).to(usual) if self.stored is not None else logits


def router(site: Site, route: Route) -> str:
    """Make a layer's router the given one."""
    gate = site.module("mlp.gate")
    if hasattr(gate, "router"):
        return site.op("mlp.gate", "router", lambda original, *rest: route.sigmoid(*rest))

    def forward(self: Any, original: Function, hidden: Tensor) -> Any:
        return route.softmax(hidden.reshape(-1, hidden.shape[-1]), self.weight, self.top_k, self.norm_topk_prob)

    return site.forward("mlp.gate", forward)


class WrongCache:
    """A cache whose `update` returns something else than it should; everything else is the real one's."""

    def __init__(self, inner: Any, change: Function) -> None:
        self.inner, self.change = inner, change

    def update(self, key: Tensor, value: Tensor, layer: int, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        """`change(key, value, past_and_present_key, past_and_present_value)`."""
        stored = self.inner.update(key, value, layer, *rest, **more)
        changed: tuple[Tensor, Tensor] = self.change(key, value, *stored)
        return changed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def cache(site: Site, change: Function, name: str = "self_attn") -> str:
    """Let a layer's attention read its cache through `change`."""

    def forward(self: Any, original: Function, *args: Any, cache: Any = None, **kwargs: Any) -> Any:
        return original(*args, cache=None if cache is None else WrongCache(cache, change), **kwargs)

    return site.forward(name, forward)
