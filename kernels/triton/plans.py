"""How the Triton kernels serve an Op: which are launched, on which grid, with which arguments and block sizes.

`plan(name, variant, arguments)` says it without triton and without touching values; on a device each launch is
`kernel[grid](*arguments, **constants)`. Blocks are powers of two, as tl.arange needs. Their limits below are those of
Ascend's 192 KiB of unified buffer (UB), which is the narrowest memory that they must fit; docs/ascend_triton.md has
the bytes that its compiler plans for each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from porter.kernels.triton.delta_launches import gated_delta_rule
from porter.kernels.triton.launch import NotServed, Plan
from porter.kernels.triton.rope_launches import rope
from porter.kernels.triton.router_launches import grouped_sigmoid, softmax
from porter.kernels.triton.row_launches import add_rms_norm, gated_rms_norm, rms_norm, swiglu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PROGRAMS = 40
"""Programs that share the rows: the vector cores of an Ascend 910B3, on which a grid of that size runs at once."""
GRID_LIMIT = 65535
"""Programs in a grid on Ascend."""
ROW_BLOCK = 8192
"""Columns of a row that a norm keeps at once: float32 rows of more, with their weights, overflow UB."""
COLUMN_BLOCK = 4096
"""Columns of a row that an activation works on at once."""
HEAD_CELLS = 4096
"""Pairs (heads times half the rotary size) that a rotary embedding turns at once."""
STATE_CELLS = 8192
"""Cells of a delta rule's float32 state that a program keeps: 32 KiB, and two products of that size beside it."""
ROUTED = 1024
"""Experts that are chosen from at once."""
GRID_LIMIT = 65535
"""Programs in a grid on Ascend."""
ROW_BLOCK = 8192
"""Columns of a row that a norm keeps at once: float32 rows of more, with their weights, overflow UB."""
COLUMN_BLOCK = 4096
"""Columns of a row that an activation works on at once."""
HEAD_CELLS = 4096
"""Pairs (heads times half the rotary size) that a rotary embedding turns at once."""
STATE_CELLS = 8192
"""Cells of a delta rule's float32 state that a program keeps: 32 KiB, and two products of that size beside it."""
ROUTED = 1024
"""Experts that are chosen from at once."""

PLANNERS: dict[tuple[str, str], Callable[..., Plan]] = {
    ("rms_norm", "standard"): partial(rms_norm, 0),
    ("rms_norm", "zero_centered"): partial(rms_norm, 1),
    ("rms_norm", "gated"): gated_rms_norm,
    ("add_rms_norm", "standard"): partial(add_rms_norm, 0),
    ("add_rms_norm", "zero_centered"): partial(add_rms_norm, 1),
    ("rope", "half"): partial(rope, False),
    ("rope", "interleaved"): partial(rope, True),
    ("swiglu", "standard"): swiglu,
    ("swiglu", "clamped"): swiglu,
    ("router", "softmax"): softmax,
    ("router", "grouped_sigmoid"): grouped_sigmoid,
    ("gated_delta_rule", "recurrent"): gated_delta_rule,
}
"""Ops with Triton kernels, and what plans their launches."""


def plan(name: str, variant: str, arguments: tuple[Any, ...], programs: int = PROGRAMS) -> Plan:
    """The launches that compute Op (name, variant) on these arguments, at most `programs` sharing the rows.

    Raises NotServed where no kernel does. Allocates the outputs, and copies of what the kernels cannot stride over.
    """
    planner = PLANNERS.get((name, variant))
    if planner is None:
        raise NotServed(f"no Triton kernel for {name}/{variant}")
    _check_dtypes(arguments)
    made = planner(programs, *arguments)
    launches = tuple(launch for launch in made.launches if min(launch.grid) > 0)
    for launch in launches:
        if launch.grid[0] * launch.grid[1] > GRID_LIMIT:
            raise NotServed(f"more than {GRID_LIMIT} programs")
    return Plan(launches, made.outputs)


def _check_dtypes(arguments: tuple[Any, ...]) -> None:
    for tensor in (a for a in arguments if isinstance(a, torch.Tensor)):
        if tensor.dtype not in DTYPES:
            raise NotServed(f"{str(tensor.dtype).removeprefix('torch.')}")
        if sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) >= 2**31:
            raise NotServed("offsets of 2^31 elements and more")
