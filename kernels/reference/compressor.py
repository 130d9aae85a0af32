"""Compression of keys: each window of tokens becomes one entry, weighted by a softmax over the window in every channel
(DeepSeek-V4, sections 2.3.1 and 2.3.2)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from porter.kernels.contract import Case, Cost, Op, Tolerance, compute_dtype, moved_bytes
from porter.kernels.reference.draw import Draw, spread

TOLERANCE = Tolerance(
    "a softmax and a weighted mean over a window, which may cancel; one rounding to the output dtype",
    terms=lambda kv, *rest: 64.0 * (2 * kv.shape[2] + 16),
    roundings=1.5,
)


def compressor_windowed(kv: torch.Tensor, gate: torch.Tensor, position_bias: torch.Tensor) -> torch.Tensor:
    """kv and gate [B, W, m, D], position_bias [m, D] -> [B, W, D]: sum over m of softmax(gate + bias) * kv.

    Rounded once. Equals what transformers' DeepseekV4HCACompressor normalises.
    """
    dtype = compute_dtype(kv.dtype)
    weights = torch.softmax(gate.to(dtype) + position_bias.to(dtype), dim=2)
    return (kv.to(dtype) * weights).sum(dim=2).to(kv.dtype)


def compressor_overlapped(
    kv: torch.Tensor,
    gate: torch.Tensor,
    position_bias: torch.Tensor,
    prior_kv: torch.Tensor | None,
    prior_gate: torch.Tensor | None,
) -> torch.Tensor:
    """kv and gate [B, W, m, 2D], position_bias [m, 2D] -> [B, W, D]: the softmax of entry w is over the first D
    channels of window w - 1 and the last D of window w.

    Before window 0 stand prior_kv and prior_gate [B, m, D], the latter with the bias added, or nothing. Equals what
    transformers' DeepseekV4CSACompressor and DeepseekV4Indexer normalise.
    """
    dtype, size = compute_dtype(kv.dtype), kv.shape[-1] // 2
    states, scores = kv.to(dtype), gate.to(dtype) + position_bias.to(dtype)
    if prior_kv is None or prior_gate is None:
        prior_kv, prior_gate = states.new_zeros(1), states.new_full((1,), -torch.inf)
    before = []
    for wide, prior in ((states, prior_kv), (scores, prior_gate)):
        first = prior.to(dtype).expand(kv.shape[0], kv.shape[2], size)
        before.append(torch.cat((first.unsqueeze(1), wide[:, :-1, :, :size]), dim=1))
    states = torch.cat((before[0], states[..., size:]), dim=2)
    weights = torch.softmax(torch.cat((before[1], scores[..., size:]), dim=2), dim=2)
    return (states * weights).sum(dim=2).to(kv.dtype)


def _fake(kv: torch.Tensor, *rest: object) -> torch.Tensor:
    return kv.new_empty((*kv.shape[:2], kv.shape[3]))


def _overlapped_fake(kv: torch.Tensor, *rest: object) -> torch.Tensor:
    return kv.new_empty((*kv.shape[:2], kv.shape[3] // 2))


def _cost(kv: torch.Tensor, *rest: object) -> Cost:
    return Cost(moved_bytes(kv, *rest) + kv.numel() // kv.shape[2] * kv.element_size(), 6 * kv.numel())


def _overlapped_cost(kv: torch.Tensor, *rest: object) -> Cost:
    return Cost(moved_bytes(kv, *rest) + kv.numel() // kv.shape[2] // 2 * kv.element_size(), 6 * kv.numel())


SHAPES = ((1, 1, 1, 1), (2, 3, 4, 16), (1, 5, 7, 33), (3, 2, 128, 24), (1, 1, 4, 512), (0, 2, 4, 16))  # B, W, m, D


def _states(draw: Draw, wide: Draw, parts: int) -> Iterator[tuple[str, tuple[torch.Tensor, ...]]]:
    for batch, windows, rate, size in SHAPES:
        shape = batch, windows, rate, parts * size
        bias = wide.normal(rate, parts * size)
        yield f"B, W, m, D = {batch, windows, rate, size}", (draw.normal(*shape), draw.normal(*shape), bias)
    kv, gate = draw.normal(2, 11, parts * 8)[:, :8].unflatten(1, (2, 4)), draw.normal(2, 2, 4, parts * 8)
    yield "windows of a longer run", (kv, spread(gate), wide.normal(4, parts * 8))
    yield "gates of hundreds, values of 1e4", (kv.clamp(-4, 4) * 1e4, gate * 200, wide.normal(4, parts * 8))
    yield "gates all alike", (kv, gate * 0, wide.normal(4, parts * 8, scale=0.0))


def _draws(dtype: torch.dtype, seed: int) -> tuple[Draw, Draw]:
    return Draw(dtype, seed), Draw(torch.float64 if dtype == torch.float64 else torch.float32, seed + 1)


def _inputs(dtype: torch.dtype) -> Iterator[Case]:
    for label, states in _states(*_draws(dtype, 101), 1):
        yield Case(label, states)


def _overlapped_inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw, wide = _draws(dtype, 103)
    for label, states in _states(draw, wide, 2):
        batch, _, rate, size = states[0].shape
        yield Case(label, (*states, None, None))
        prior = draw.normal(batch, rate, size // 2), wide.normal(batch, rate, size // 2)
        yield Case(f"{label}, after others", (*states, *prior))


WINDOWED = "(Tensor kv, Tensor gate, Tensor position_bias) -> Tensor"
OVERLAPPED = "(Tensor kv, Tensor gate, Tensor position_bias, Tensor? prior_kv, Tensor? prior_gate) -> Tensor"

OPS = (
    Op("compressor", "windowed", WINDOWED, compressor_windowed, _fake, _inputs, TOLERANCE, _cost),
    Op(
        "compressor",
        "overlapped",
        OVERLAPPED,
        compressor_overlapped,
        _overlapped_fake,
        _overlapped_inputs,
        TOLERANCE,
        _overlapped_cost,
    ),
)
