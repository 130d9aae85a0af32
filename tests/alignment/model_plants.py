"""Ways to break a module of a live model."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from porter.alignment.hypotheses.surgery import rebind_globals, wrap_attention

Plant = Callable[[Any], object]


def at(module: str, change: Plant) -> Plant:
    return lambda model: change(model.get_submodule(module))


def attending(change: Callable[..., Any]) -> Plant:
    """`change(attend, module, query, key, value, mask, **options)` in place of the attention function."""

    def wrap(attend: Any) -> Any:
        return lambda module, q, k, v, mask=None, **options: change(attend, module, q, k, v, mask, **options)

    return lambda attention: wrap_attention(attention, wrap)


def logits_of(q: Tensor, k: Tensor, mask: Any, scaling: float) -> Tensor:
    logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3) * scaling
    return logits if mask is None else logits + mask


def weighing(weights: Callable[[Tensor], Tensor]) -> Plant:
    def change(_: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **__: Any) -> Any:
        values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        return (weights(logits_of(q, k, mask, scaling)) @ values).transpose(1, 2).contiguous(), None

    return attending(change)


def _one_short(attend: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
    if q.shape[2] == 1 and k.shape[2] > 2:
        k, v = (torch.cat((states[:, :, :-2], states[:, :, -1:]), 2) for states in (k, v))
        mask = None if mask is None else mask[..., 1:]
    return attend(module, q, k, v, mask, **options)


def _padding_attended(attend: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
    if q.shape[2] > 1:
        future = torch.full((q.shape[2], k.shape[2]), torch.finfo(q.dtype).min, dtype=q.dtype)
        mask = future.triu(1)[None, None]
    return attend(module, q, k, v, mask, **options)


def _float8_cache(attend: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
    k, v = (states.to(torch.float8_e4m3fn).to(q.dtype) for states in (k, v))
    return attend(module, q, k, v, mask, **options)


def wiped_entries(attention: Any) -> None:
    """Before each decode step the last entry of the cache is zeroed."""
    inner = attention.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        if hidden_states.shape[1] == 1 and cache is not None:
            layer = cache.layers[attention.layer_idx]
            for name in ("keys", "values"):
                if getattr(layer, name) is not None:
                    states = getattr(layer, name).clone()
                    states[:, :, -1] = 0
                    setattr(layer, name, states)
        return inner(hidden_states, *args, **kwargs)

    attention.forward = forward


def norm_in(dtype: torch.dtype, plus: float = 0.0, one_by_one: bool = False) -> Plant:
    def plant(norm: Any) -> None:
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0))

        def forward(self: Any, x: Tensor) -> Tensor:
            narrow, weight = x.to(dtype), (self.weight + plus).to(dtype)
            squares = narrow.pow(2)
            variance = squares.mean(-1, keepdim=True)
            if one_by_one:
                total = torch.zeros_like(squares[..., 0])
                for column in squares.unbind(-1):
                    total = total + column
                variance = (total / x.shape[-1])[..., None]
            return (weight * (narrow * torch.rsqrt(variance + eps))).to(x.dtype)

        norm.forward = types.MethodType(forward, norm)

    return plant


class Narrow:
    """torch.nn.functional with products in bfloat16."""

    def __getattr__(self, name: str) -> Any:
        return getattr(functional, name)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(x.to(torch.bfloat16), weight.to(torch.bfloat16)).to(x.dtype)


def output_times(factor: float) -> Plant:
    def plant(module: Any) -> None:
        inner = module.forward
        module.forward = lambda *args, **kwargs: factor * inner(*args, **kwargs)

    return plant


def one_rank(linear: Any) -> None:
    half = linear.weight.shape[1] // 2
    linear.forward = lambda x: functional.linear(x[..., :half], linear.weight[:, :half])


def experts_of_one_rank(experts: Any) -> None:
    inner = experts.forward
    experts.forward = lambda hidden, chosen, weights: inner(hidden, chosen, weights * (chosen < 4))


def states(before: Any = None, after: Any = None) -> Plant:
    """Change the states of a gated delta net before or after each call: (layer of the cache, tokens)."""

    def plant(mixer: Any) -> None:
        inner = mixer.forward

        def forward(hidden_states: Tensor, cache: Any = None, **rest: Any) -> Any:
            cache = rest.pop("past_key_values", None) if cache is None else cache
            layer = cache.layers[mixer.layer_idx]
            if before is not None and hidden_states.shape[1] == 1:
                before(layer)
            output = inner(hidden_states, cache=cache, **rest)
            if after is not None:
                after(layer)
            return output

        mixer.forward = forward

    return plant


def stored_as(dtype: torch.dtype) -> Plant:
    return states(after=lambda layer: layer.recurrent_states[0].copy_(layer.recurrent_states[0].to(dtype)))


def padded_after(after: int) -> Plant:
    """The convolution sees `after` tokens of the future."""

    def convolve(hidden: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **_: Any) -> Tensor:
        wide = functional.pad(hidden, (3 - after, after))
        return functional.silu(functional.conv1d(wide, weight.unsqueeze(1), bias, groups=weight.shape[0]))

    return lambda mixer: rebind_globals(mixer, {"causal_conv1d_fn": convolve})


def dropout(module: Any) -> None:
    inner = module.forward
    module.forward = lambda x: functional.dropout(inner(x), 0.1, training=True)


def racing_channel(linear: Any) -> None:
    def forward(x: Tensor) -> Tensor:
        output = functional.linear(x, linear.weight).clone()
        output[..., 3] += torch.randn(())
        return output

    linear.forward = forward


def rewritten(change: Callable[[Tensor], Tensor], name: str = "weight") -> Plant:
    def plant(module: nn.Module) -> None:
        tensor = module.get_buffer(name) if name in module._buffers else module.get_parameter(name)
        tensor.data.copy_(change(tensor.detach().clone()))

    return plant


def with_zero_points(weight: Tensor) -> Tensor:
    groups = weight.unflatten(-1, (-1, 16))
    return (groups + (groups.amax(-1, keepdim=True) + groups.amin(-1, keepdim=True)) / 2).flatten(-2)


def unsigned(weight: Tensor) -> Tensor:
    span = weight.amax(-1, keepdim=True) - weight.amin(-1, keepdim=True)
    return torch.where(weight < 0, weight + span, weight)


def rescaled(misread: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Blocks of 8 x 8 under the scales that `misread` makes of theirs [r, c] (or of every element's [R, C])."""

    def change(weight: Tensor) -> Tensor:
        scales = weight.unflatten(0, (-1, 8)).unflatten(-1, (-1, 8)).abs().amax((1, 3))
        used = misread(scales)
        each = scales.repeat_interleave(8, 0).repeat_interleave(8, 1)
        if used.shape == scales.shape:
            used = used.repeat_interleave(8, 0).repeat_interleave(8, 1)
        return weight / each * used[: weight.shape[0], : weight.shape[1]]

    return change


def twice_as_large(scales: Tensor) -> Tensor:
    return scales.repeat_interleave(16, 0).repeat_interleave(16, 1)


ATTENTION, LINEAR, GATE, UP = (
    f"model.layers.1.{name}" for name in ("self_attn", "linear_attn", "mlp.gate", "mlp.up_proj")
)
NORM, AFTER, EXPERTS, DOWN, OUT = (
    f"model.layers.1.{name}"
    for name in ("input_layernorm", "post_attention_layernorm", "mlp.experts", "mlp.down_proj", "self_attn.o_proj")
)
