"""Rotary position embeddings by torch_npu, every one over tokens in the layout [1, T, heads, D].

That layout is what projections give, so that a transposed query costs no copy, and its cosines [1, T, 1, D] are
documented for every operator and mode, also where batch rows have positions of their own.

npu_rotary_mul documents cosines and sines in [-1, 1], and YaRN makes them longer: both are halved and the result is
doubled, which is exact and leaves room for a factor of 2. npu_apply_rotary_pos_emb has no such limit, but turns query
and key in place, so it is given copies; npu_interleave_rope has neither.
"""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.catalogue.rope import fits_buffer
from porter.kernels.ascend.dry_run import Kernel

Pair = tuple[torch.Tensor, torch.Tensor]


def rope_half(torch_npu: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """One npu_apply_rotary_pos_emb for 64 or 128 turned dimensions; else npu_rotary_mul for query and key each."""
    rotary, cos, sin = cos.shape[-1], _angles(cos, len(query)), _angles(sin, len(query))
    turned = _turn_halves(torch_npu, _tokens(query[..., :rotary]), _tokens(key[..., :rotary]), cos, sin, fresh=False)
    first, second = (_with_rest(_heads(t, x), x) for t, x in zip(turned, (query, key), strict=True))
    return first, second


def rope_interleaved(
    torch_npu: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> Pair:
    """npu_interleave_rope for 64 dimensions in 16 bits; else pairs made halves first, then as `rope_half`."""
    tokens, cos, sin = (_tokens(query), _tokens(key)), _angles(cos, len(query)), _angles(sin, len(query))
    if query.shape[-1] == 64 and query.dtype == cos.dtype and query.dtype != torch.float32:
        # One token a batch row: [T, heads, 1, D].
        rows = [t.permute(1, 2, 0, 3).contiguous() for t in (*tokens, cos, sin)]
        turned = tuple(torch_npu.npu_interleave_rope(x, rows[2], rows[3]).permute(2, 0, 1, 3) for x in rows[:2])
    else:
        halves = [torch.cat((t[..., 0::2], t[..., 1::2]), dim=-1) for t in tokens]
        turned = _turn_halves(torch_npu, halves[0], halves[1], cos, sin, fresh=True)
    return _heads(turned[0], query), _heads(turned[1], key)


def rope_complex(torch_npu: Any, query: torch.Tensor, key: torch.Tensor, angles: torch.Tensor) -> Pair:
    """npu_rotary_mul over neighbours for query and key each."""
    cos, sin = (_angles(_twice(part), len(query)) for part in (angles.real, angles.imag))
    first, second = (_heads(_turn(torch_npu, _tokens(x), cos, sin, "interleave"), x) for x in (query, key))
    return first, second


def rope_trailing(torch_npu: Any, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """npu_rotary_mul over the neighbours among the last dimensions."""
    passed = states.shape[-1] - 2 * cos.shape[-1]
    cos, sin = (_angles(_twice(part), len(states)) for part in (cos, sin))
    turned = _heads(_turn(torch_npu, _tokens(states[..., passed:]), cos, sin, "interleave"), states)
    return turned if passed == 0 else torch.cat((states[..., :passed], turned), dim=-1)


def _turn_halves(
    torch_npu: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, fresh: bool
) -> Pair:
    """Both in one call where it is documented. `fresh`: nobody else sees query and key, so they may be overwritten."""
    if cos.shape[-1] not in (64, 128) or cos.dtype != query.dtype or not _room(query, key):
        return _turn(torch_npu, query, cos, sin, "half"), _turn(torch_npu, key, cos, sin, "half")
    if not fresh:
        query, key = (t.clone(memory_format=torch.contiguous_format) for t in (query, key))
    turned: Pair = torch_npu.npu_apply_rotary_pos_emb(query, key, cos, sin, layout="BSND", rotary_mode="half")
    return turned


def _room(query: torch.Tensor, key: torch.Tensor) -> bool:
    return fits_buffer(query.shape[2], key.shape[2], query.shape[3], query.dtype)


def _turn(torch_npu: Any, tokens: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: str) -> torch.Tensor:
    """tokens [1, T, heads, D] turned by angles of any length up to 2, in the wider dtype of the two."""
    dtype, wide = tokens.dtype, torch.promote_types(tokens.dtype, cos.dtype)
    halved = [(0.5 * a).to(wide) for a in (cos, sin)]
    turned: torch.Tensor = torch_npu.npu_rotary_mul(tokens.to(wide), *halved, rotary_mode=mode, rotate=None)
    return turned.mul_(2.0).to(dtype)


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """[B, heads, S, D] -> [1, B S, heads, D]."""
    return x.transpose(1, 2).flatten(0, 1).unsqueeze(0)


def _heads(tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[1, B S, heads, D] -> [B, heads, S, D], B and S those of `like`."""
    return tokens.reshape(len(like), like.shape[2], *tokens.shape[2:]).transpose(1, 2)


def _angles(angles: torch.Tensor, batch: int) -> torch.Tensor:
    """[B or 1, S, D] -> [1, B S, 1, D]."""
    return angles.expand(batch, -1, -1).flatten(0, 1).unsqueeze(0).unsqueeze(2)


def _twice(angles: torch.Tensor) -> torch.Tensor:
    """[..., D/2], one for each pair -> [..., D], one for each value."""
    return torch.stack((angles, angles), dim=-1).flatten(-2)


def _with_rest(turned: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The dimensions of `whole` past those that were turned, behind them."""
    rotary = turned.shape[-1]
    return turned if rotary == whole.shape[-1] else torch.cat((turned, whole[..., rotary:]), dim=-1)


KERNELS: dict[tuple[str, str], Kernel] = {
    ("rope", "half"): rope_half,
    ("rope", "interleaved"): rope_interleaved,
    ("rope", "complex"): rope_complex,
    ("rope", "trailing"): rope_trailing,
}
