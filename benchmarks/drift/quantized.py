"""Goldens whose weights came from a quantized checkpoint: fp8 in blocks of 32 x 32, or int4 in groups of 32 columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 32
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
Stored = dict[str, tuple[Tensor, ...]]


def to_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes float32 [N, K] that float8 holds exactly, and a scale per block [N / 32, K / 32]."""
    rows, columns = weight.shape[0] // BLOCK, weight.shape[1] // BLOCK
    tiles = weight.float().view(rows, BLOCK, columns, BLOCK)
    scale = tiles.abs().amax(dim=(1, 3)) / FP8_MAX
    codes = (tiles / scale[:, None, :, None]).to(FP8).float().view(weight.shape)
    return codes, scale


def blocked(codes: Tensor, scale: Tensor, size: int = BLOCK) -> Tensor:
    """Dequantized [N, K]; with another `size` the scales are taken from the wrong places, the last ones repeated."""
    row = (torch.arange(codes.shape[0]) // size).clamp(max=scale.shape[0] - 1)
    column = (torch.arange(codes.shape[1]) // size).clamp(max=scale.shape[1] - 1)
    return codes * scale[row][:, column]


def to_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0..15 [N, K], and per group of 32 columns a scale and a zero point [N, K / 32]."""
    groups = weight.float().unflatten(1, (-1, BLOCK))
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / 15).clamp_min(1e-8)
    zero = (-low / scale).round().clamp(0, 15)
    codes = ((groups / scale[..., None]).round() + zero[..., None]).clamp(0, 15).flatten(1)
    return codes, scale, zero


def grouped(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Dequantized [N, K]: (codes - zero) * scale."""
    values: Tensor = (codes.unflatten(1, (-1, BLOCK)) - zero[..., None]) * scale[..., None]
    return values.flatten(1)


def quantize(model: Any, variant: str) -> Stored:
    """Replace the layers' linear weights by what a quantized checkpoint holds; returns what it would store.

    Matrices that do not divide into blocks keep their values.
    """
    stored: Stored = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or ".layers." not in name:
            continue
        weight = module.weight.data
        if weight.shape[0] % BLOCK or weight.shape[1] % BLOCK:
            continue
        # Scales of released checkpoints differ widely between blocks; those of so small a matrix do not.
        spread = torch.exp(0.5 * torch.randn(len(weight) // BLOCK, weight.shape[1] // BLOCK, generator=_seeded(name)))
        weight = blocked(weight.float(), spread)
        if variant == "blocks":
            codes, scale = stored[name] = to_blocks(weight)
            module.weight.data.copy_(blocked(codes, scale))
        else:
            codes, scale, zero = stored[name] = to_groups(weight)
            module.weight.data.copy_(grouped(codes, scale, zero))
    return stored


def _seeded(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(sum(name.encode()))
