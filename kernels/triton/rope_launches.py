"""Launches of the rotary embeddings."""

from __future__ import annotations

import torch

from porter.kernels.triton.launch import (
    Arguments,
    Constants,
    Launch,
    NotServed,
    Plan,
    blocks,
    power_of_two,
    unit_stride,
)

HEAD_CELLS = 2048
"""Pairs of values, heads times half the rotary size, that are turned at once."""
STATE_CELLS = 8192
"""Cells of a delta rule's float32 state that a program keeps: 32 KiB, and two products of that size beside it."""
ROUTED = 1024
"""Experts that are chosen from at once."""


def rope(
    neighbours: bool, programs: int, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> Plan:
    """Query and key, a launch each, and one more for each where dimensions past the rotary ones pass through."""
    if neighbours and cos.shape[-1] != query.shape[-1]:
        raise NotServed("neighbouring pairs in a part of the head")
    cos, sin = unit_stride(cos), unit_stride(sin)
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    launches: list[Launch] = []
    outputs = []
    for states in (unit_stride(query), unit_stride(key)):
        turned = states.new_empty(states.shape)
        launches += _turning(programs, states, turned, cos, sin, neighbours)
        outputs.append(turned)
    return Plan(tuple(launches), tuple(outputs))


def _turning(
    programs: int,
    states: torch.Tensor,
    turned: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    neighbours: bool,
) -> list[Launch]:
    batch, heads, length, size = states.shape
    rotary = cos.shape[-1]
    strides = dict(zip(("batch_stride", "head_stride", "position_stride"), states.stride(), strict=False))
    counts: Arguments = {"positions": batch * length, "length": length, "heads": heads, "size": size, **strides}
    grid, blocks_of = _tiles(programs, batch * length, heads, rotary // 2)
    arguments: Arguments = {"states": states, "cos": cos, "sin": sin, "turned": turned, "half": rotary // 2, **counts}
    arguments |= {"angle_batch_stride": 0 if cos.shape[0] == 1 else cos.stride(0), "angle_stride": cos.stride(1)}
    constants: Constants = {"NEIGHBOURS": neighbours, "HEADS": blocks_of[0], "HALF": blocks_of[1]}
    launches = [Launch("rope", "rope", grid, arguments, constants, ("turned",))]
    if rotary < size:
        grid, blocks_of = _tiles(programs, batch * length, heads, size - rotary)
        rest: Arguments = {"states": states, "turned": turned, **counts, "start": rotary}
        constants = {"HEADS": blocks_of[0], "TAIL": blocks_of[1]}
        launches.append(Launch("rope", "copy_tail", grid, rest, constants, ("turned",)))
    return launches


def _tiles(programs: int, positions: int, heads: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(grid, heads and values of a head in a block)."""
    block = power_of_two(width)
    tile = min(power_of_two(heads), max(HEAD_CELLS // block, 1))
    across = blocks(heads, tile)
    return (min(positions, max(programs // max(across, 1), 1)), across), (tile, block)
