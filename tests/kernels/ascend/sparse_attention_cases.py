"""Calls of the vendor's sparse operators that the tests share."""

from __future__ import annotations

from typing import Any

import torch

DTYPES = (torch.bfloat16, torch.float16)
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged(states: list[torch.Tensor], block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences [T, 1, D] in blocks that lie in reverse order, and the table; unused places are NaN."""
    counts = [-(-len(s) // block) for s in states]
    pool = torch.full((sum(counts) + 1, block, 1, states[0].shape[-1]), torch.nan, dtype=states[0].dtype)
    table = torch.full((len(states), max(counts) + 1), -1, dtype=torch.int32)
    free = list(range(sum(counts), 0, -1))
    for i, state in enumerate(states):
        for j in range(counts[i]):
            at = free.pop(0)
            rows = state[j * block : (j + 1) * block]
            pool[at, : len(rows)] = rows
            table[i, j] = at
    return pool, table


def arranged(layout_query: str, layout_key: str, query: list[torch.Tensor], key: list[torch.Tensor]) -> dict[str, Any]:
    """Sequences of queries [S, N, D] and keys [T, 1, D] in the layouts, with the arguments that go with them."""
    counted = (torch.tensor([len(x) for x in xs]) for xs in (query, key))
    taken, held = (n.to(torch.int32) for n in counted)
    arguments: dict[str, Any] = {"layout_query": layout_query, "lengths_query": taken, "lengths_key": held}
    if layout_query == "TND":
        arguments["query"], arguments["lengths_query"] = torch.cat(query), taken.cumsum(0, dtype=torch.int32)
    else:
        arguments["query"] = torch.nn.utils.rnn.pad_sequence(query, batch_first=True)
    if layout_key == "TND":
        arguments["key"], arguments["lengths_key"] = torch.cat(key), held.cumsum(0, dtype=torch.int32)
    elif layout_key == "BSND":
        arguments["key"] = torch.nn.utils.rnn.pad_sequence(key, batch_first=True)
    else:
        arguments["key"], arguments["block_table"] = paged(key, 16)
    return arguments


LAYOUTS = (("BSND", "BSND"), ("TND", "TND"), ("BSND", "PA_BSND"), ("TND", "PA_BSND"))
SEQUENCES = ((3, 37), (1, 5), (4, 19))  # queries, keys


def selection(queries: int, keys: int, count: int, block: int = 1, seed: int = 0) -> torch.Tensor:
    """Int32 [S, 1, K]: for each query `count` of the blocks that it sees at random, -1 after them."""
    generator = torch.Generator().manual_seed(seed + queries)
    rows = torch.full((queries, 1, count), -1, dtype=torch.int32)
    for row in range(queries):
        visible = -(-(keys - queries + row + 1) // block)
        taken = torch.randperm(visible, generator=generator)[:count]
        rows[row, 0, : len(taken)] = taken.to(torch.int32)
    return rows


def attention_call(**changed: Any) -> dict[str, Any]:
    key = normal(1, 9, 1, 512)
    call = {
        "query": normal(1, 2, 4, 512),
        "key": key,
        "value": changed.get("key", key),
        "sparse_indices": selection(2, 9, 5)[None],
        "scale_value": 0.07,
        "query_rope": normal(1, 2, 4, 64),
        "key_rope": normal(1, 9, 1, 64),
        "sparse_block_size": 1,
        "layout_query": "BSND",
        "layout_kv": "BSND",
        "sparse_mode": 3,
        "attention_mode": 2,
    }
    return {
        name: value for name, value in {**call, **changed}.items() if not isinstance(value, str) or value != "left out"
    }


def first_row(*indices: int) -> torch.Tensor:
    return torch.tensor([[list(indices)], [[0, 1, 2, 3]]], dtype=torch.int32)[None]
