"""Causal depthwise convolution over time with a state, and silu: the short convolution of linear attention layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from porter.kernels.contract import Case, Cost, Op, Tolerance, compute_dtype, moved_bytes
from porter.kernels.reference.draw import Draw, spread, strided

TOLERANCE = Tolerance(
    "a sum of K products and a silu per value, relative to the row of channels; one rounding to the output dtype. The "
    "state is copied, never computed",
    terms=lambda hidden_states, weight, *rest: weight.shape[-1] + 64,
)


def causal_conv1d_silu(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden_states [B, T, C], weight [C, K], bias [C], state [B, C, K] -> (output [B, T, C], next state [B, C, K]).

    output[t, c] = silu(bias[c] + sum over j of weight[c, j] * input[t - K + 1 + j, c]), where the inputs before the
    first are the last columns of `state`, oldest first, or zeros without one. The next state holds the last K inputs.
    Equals `causal_conv1d_fn` and `causal_conv1d_update` of transformers' qwen3_next, which put channels before time.
    """
    dtype, kernel = compute_dtype(hidden_states.dtype), weight.shape[-1]
    new = hidden_states.transpose(1, 2)
    past = new.new_zeros(*new.shape[:2], kernel) if state is None else state[..., -kernel:]
    history = torch.cat((past, new), dim=-1)
    windows = history[..., 1:].unfold(-1, kernel, 1).to(dtype)
    output = (windows * weight.to(dtype)[:, None, :]).sum(-1)
    if bias is not None:
        output = output + bias.to(dtype)[:, None]
    activated = torch.nn.functional.silu(output).to(hidden_states.dtype)
    return activated.transpose(1, 2).contiguous(), history[..., -kernel:].contiguous()


def _fake(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, _, channels = hidden_states.shape
    return hidden_states.new_empty(hidden_states.shape), hidden_states.new_empty(batch, channels, weight.shape[-1])


def _cost(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None
) -> Cost:
    times = 1 if state is None else 2  # written, and read where there is one
    states = times * hidden_states.shape[0] * weight.numel() * hidden_states.element_size()
    moved = moved_bytes(hidden_states, hidden_states, weight, bias) + states
    return Cost(moved, (2 * weight.shape[-1] + 4) * hidden_states.numel())


SHAPES = (  # batch, tokens, channels, kernel
    (1, 1, 1, 4),
    (2, 1, 17, 4),
    (1, 2, 33, 4),
    (2, 3, 64, 4),
    (1, 5, 300, 4),
    (3, 19, 37, 2),
    (2, 7, 20, 3),
    (1, 6, 16, 1),
    (2, 11, 521, 5),
    (0, 3, 16, 4),
)


def _inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 61)
    for batch, tokens, channels, kernel in SHAPES:
        hidden_states = draw.normal(batch, tokens, channels, scale=2.0)
        weight = draw.normal(channels, kernel, scale=kernel**-0.5)
        bias, state = draw.normal(channels), draw.normal(batch, channels, kernel, scale=2.0)
        label = f"B={batch} T={tokens} C={channels} K={kernel}"
        yield Case(label, (hidden_states, weight, None, None))
        yield Case(f"{label} state", (hidden_states, weight, None, state))
        yield Case(f"{label} bias, state", (hidden_states, weight, bias, state))
    weight, state = draw.normal(24, 4), draw.normal(2, 24, 4)
    hidden_states = draw.normal(2, 9, 24)
    yield Case("rows apart", (spread(hidden_states), weight, None, state))
    yield Case("last dimension strided", (strided(hidden_states), weight, None, state))
    yield Case("channels before time", (draw.normal(2, 24, 9).transpose(1, 2), weight, None, state))
    yield Case("state longer than the kernel", (hidden_states, weight, None, draw.normal(2, 24, 7)[..., -4:]))
    yield Case("1e4", (hidden_states * 1e4, weight, None, state * 1e4))
    yield Case("zeros", (hidden_states * 0, weight, None, None))


OPS = (
    Op(
        "causal_conv1d",
        "silu",
        "(Tensor hidden_states, Tensor weight, Tensor? bias, Tensor? state) -> (Tensor, Tensor)",
        causal_conv1d_silu,
        _fake,
        _inputs,
        TOLERANCE,
        _cost,
    ),
)
