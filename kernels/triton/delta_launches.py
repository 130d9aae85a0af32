"""Launch of the gated delta rule."""

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

STATE_CELLS = 8192
"""Cells of the float32 state that a program keeps: 32 KiB, and products of that size beside it."""
KEY_SIZE = 256


def gated_delta_rule(
    programs: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
) -> Plan:
    """A program for each head of each sequence and each block of columns of its state, whatever `programs` is."""
    query, key, value = unit_stride(query), unit_stride(key), unit_stride(value)
    batch, tokens, heads, value_size = value.shape
    key_size = key.shape[-1]
    if key_size > KEY_SIZE:
        raise NotServed(f"keys of more than {KEY_SIZE}")
    keys = power_of_two(key_size)
    columns = min(power_of_two(value_size), STATE_CELLS // keys)
    output = value.new_empty(value.shape)
    next_state = value.new_empty(batch, heads, key_size, value_size, dtype=torch.float32)
    arguments: Arguments = {"query": query, "key": key, "value": value, "decay": decay.float().contiguous()}
    arguments |= {"beta": beta.float().contiguous(), "output": output, "next_state": next_state}
    # Where there is no state, its address is never read.
    arguments["state"] = next_state if state is None else state.float().contiguous()
    arguments |= {"tokens": tokens, "heads": heads, "share": heads // key.shape[2], "key_size": key_size}
    arguments |= {"value_size": value_size, "scale": key_size**-0.5}
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        strides = zip(("batch", "token", "head"), tensor.stride(), strict=False)
        arguments |= {f"{name}_{axis}_stride": stride for axis, stride in strides}
    constants: Constants = {"HAS_STATE": state is not None, "KEYS": keys, "VALUES": columns}
    grid = (batch * heads, blocks(value_size, columns))
    writes = ("output", "next_state")
    launch = Launch("gated_delta_rule", "gated_delta_rule", grid, arguments, constants, writes)
    return Plan((launch,), (output, next_state))
