"""Calls of the vendor's gated delta rule that the tests share."""

from __future__ import annotations

from typing import Any

import torch


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.nn.functional.normalize(normal(*shape, seed=seed), dim=-1).bfloat16()


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def whole(counts: tuple[int, ...], key_heads: int, heads: int, size: int, wide: int, **changed: Any) -> dict[str, Any]:
    """Arguments of npu_chunk_gated_delta_rule for sequences of `counts` tokens."""
    tokens = sum(counts)
    call = {
        "query": unit(tokens, key_heads, size, seed=1),
        "key": unit(tokens, key_heads, size, seed=2),
        "value": normal(tokens, heads, wide).bfloat16(),
        "beta": (0.01 + 0.98 * uniform(tokens, heads)).bfloat16(),
        "initial_state": normal(len(counts), heads, wide, size).bfloat16(),
        "actual_seq_lengths": lengths(*counts),
        "scale": size**-0.5,
        "g": -uniform(tokens, heads, seed=3),
    }
    return {name: value for name, value in {**call, **changed}.items() if not isinstance(value, str)}


def decode(counts: tuple[int, ...], key_heads: int, heads: int, size: int, wide: int, **changed: Any) -> dict[str, Any]:
    """Arguments of npu_recurrent_gated_delta_rule: blocks in reverse order, one more than tokens."""
    call = whole(counts, key_heads, heads, size, wide)
    del call["initial_state"]
    tokens = sum(counts)
    call["state"] = normal(tokens + 1, heads, wide, size).bfloat16()
    call["ssm_state_indices"] = torch.arange(tokens, 0, -1, dtype=torch.int32)
    return {name: value for name, value in {**call, **changed}.items() if not isinstance(value, str)}
