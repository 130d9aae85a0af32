"""Launches of the kernels that work on rows: norms and gated activations."""

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
    rows_of,
    unit_stride,
)

ROW_BLOCK = 8192
"""Columns of a row that a norm keeps at once: float32 rows of more, with their weights, overflow UB."""
COLUMN_BLOCK = 4096
"""Columns of a row that an activation works on at once."""


def rms_norm(centre: int, programs: int, hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> Plan:
    """norm(hidden_states) * (centre + weight)."""
    x, rows, width, stride = rows_of(hidden_states)
    normed = hidden_states.new_empty(hidden_states.shape)
    arguments: Arguments = {"hidden_states": x, "weight": unit_stride(weight), "normed": normed}
    arguments |= {"rows": rows, "width": width, "row_stride": stride, "eps": eps}
    constants: Constants = {"CENTRE": centre, "BLOCK": _row_block(width)}
    grid = (min(rows, programs), 1)
    return Plan((Launch("rms_norm", "rms_norm", grid, arguments, constants, ("normed",)),), (normed,))


def add_rms_norm(
    centre: int,
    programs: int,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> Plan:
    """The same of the sum with the residual, and the sum."""
    x, rows, width, stride = rows_of(hidden_states)
    r, _, _, residual_stride = rows_of(residual)
    normed, total = (hidden_states.new_empty(hidden_states.shape) for _ in range(2))
    arguments: Arguments = {"hidden_states": x, "residual": r, "weight": unit_stride(weight)}
    arguments |= {"normed": normed, "total": total, "rows": rows, "width": width}
    arguments |= {"row_stride": stride, "residual_stride": residual_stride, "eps": eps}
    constants: Constants = {"CENTRE": centre, "BLOCK": _row_block(width)}
    grid = (min(rows, programs), 1)
    launch = Launch("rms_norm", "add_rms_norm", grid, arguments, constants, ("normed", "total"))
    return Plan((launch,), (normed, total))


def gated_rms_norm(
    programs: int, hidden_states: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float
) -> Plan:
    """norm(hidden_states) * weight * silu(gate)."""
    x, rows, width, stride = rows_of(hidden_states)
    g, _, _, gate_stride = rows_of(gate)
    normed = hidden_states.new_empty(hidden_states.shape)
    arguments: Arguments = {"hidden_states": x, "weight": unit_stride(weight), "gate": g, "normed": normed}
    arguments |= {"rows": rows, "width": width, "row_stride": stride, "gate_stride": gate_stride, "eps": eps}
    constants: Constants = {"BLOCK": _row_block(width)}
    grid = (min(rows, programs), 1)
    return Plan((Launch("rms_norm", "gated_rms_norm", grid, arguments, constants, ("normed",)),), (normed,))


def swiglu(programs: int, gate_up: torch.Tensor, limit: float | None = None) -> Plan:
    """silu(gate) * up, the columns on the grid's second axis."""
    x, rows, both, stride = rows_of(gate_up)
    width = both // 2
    activated = gate_up.new_empty(*gate_up.shape[:-1], width)
    block = min(power_of_two(width), COLUMN_BLOCK)
    across = blocks(width, block)
    arguments: Arguments = {"gate_up": x, "activated": activated, "rows": rows, "width": width, "row_stride": stride}
    arguments |= {"limit": float("inf") if limit is None else float(limit)}
    grid = (min(rows, max(programs // max(across, 1), 1)), across)
    constants: Constants = {"CLAMPED": limit is not None, "BLOCK": block}
    return Plan((Launch("swiglu", "swiglu", grid, arguments, constants, ("activated",)),), (activated,))


def _row_block(width: int) -> int:
    if width > ROW_BLOCK:
        raise NotServed(f"rows of more than {ROW_BLOCK}")
    return power_of_two(width)
