"""How the vendor's attention operators lay out queries, keys, values and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from porter.kernels.ascend.catalogue.vendor_op import Call

INPUT_RANK = {"BSH": 3, "SBH": 3, "BSND": 4, "BNSD": 4, "TND": 3, "NTD": 3}
"""The dimensions of a layout: B batch, S sequence, N heads, D head size, H = N * D, T all sequences in a row."""

PACKED = ("TND", "NTD")
COMPRESSED = 2048
"""The side of the one mask that stands for every causal one."""
UNLIMITED = 2147483647
"""No limit on the keys before or after a query."""
LATENT, ROPE = 512, 64
"""The one kv_lora_rank and rope size whose latents the vendor's operators take."""


def heads_first(tensor: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """A view [B, N, S, D] of a tensor in `layout`; packed ones have B = 1 and S = T."""
    if layout in ("BSH", "SBH"):
        split: torch.Tensor = tensor.unflatten(-1, (heads, -1))
        return split.transpose(1, 2) if layout == "BSH" else split.permute(1, 2, 0, 3)
    if layout == "BSND":
        return tensor.transpose(1, 2)
    if layout == "TND":
        return tensor.transpose(0, 1)[None]
    return tensor[None] if layout == "NTD" else tensor


def arranged(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor [B, N, S, D] in `layout`, contiguous; NBSD is an output's alone."""
    if layout == "BSH":
        tensor = tensor.transpose(1, 2).flatten(2)
    elif layout == "SBH":
        tensor = tensor.permute(2, 0, 1, 3).flatten(2)
    elif layout == "BSND":
        tensor = tensor.transpose(1, 2)
    elif layout == "NBSD":
        tensor = tensor.transpose(0, 1)
    elif layout == "TND":
        tensor = tensor[0].transpose(0, 1)
    elif layout == "NTD":
        tensor = tensor[0]
    return tensor.contiguous()


def pages_first(cache: torch.Tensor, key_heads: int) -> torch.Tensor:
    """A view [pages, N, page size, D] of a paged cache (pages, page size, H) or (pages, N, page size, D)."""
    return cache if cache.dim() == 4 else cache.unflatten(-1, (key_heads, -1)).transpose(1, 2)


@dataclass(frozen=True)
class Names:
    """What an operator calls the arguments that several of them share."""

    heads: str
    scale: str
    query_lengths: str
    key_lengths: str
    softmax_lse: str
    key_heads: str = "num_key_value_heads"
    pse: str = "pse_shift"
    pre: str = "pre_tokens"
    next: str = "next_tokens"


@dataclass(frozen=True)
class Geometry:
    """The sizes of one call. Packed sequences have batch 1, and the rows of all of them as `queries` and `keys`."""

    batch: int
    heads: int
    queries: int
    head_dim: int
    key_heads: int
    keys: int
    key_dim: int
    value_dim: int
    packed: bool
    output_layout: str


def split_layout(layout: str) -> tuple[str, str]:
    """The layouts of the inputs and of the output."""
    inputs, _, output = layout.partition("_")
    return inputs, output or inputs


def key_heads_of(call: Call, names: Names) -> int:
    """The heads of the keys: as the argument says, where 0 stands for as many as the queries', or as the key's shape
    says where the operator has no such argument."""
    if names.key_heads:
        return int(call[names.key_heads]) or int(call[names.heads])
    layout, key = call["input_layout"], call["key"]
    if layout in ("BSH", "SBH"):
        return int(key.shape[-1]) // max(1, int(call["query"].shape[-1]) // int(call[names.heads]))
    return int(key.shape[2 if layout == "BSND" else 1])


def geometry(call: Call, names: Names) -> Geometry:
    """The sizes of a call whose layout fits the ranks of its tensors."""
    inputs, output = split_layout(call["input_layout"])
    key_heads = key_heads_of(call, names)
    query = heads_first(call["query"], inputs, call[names.heads])
    if call.arguments.get("block_table") is not None:
        key, value = (pages_first(call[name], key_heads) for name in ("key", "value"))
        keys = call["block_table"].shape[1] * call["block_size"]
    else:
        key, value = (heads_first(call[name], inputs, key_heads) for name in ("key", "value"))
        keys = key.shape[2]
    return Geometry(
        batch=query.shape[0],
        heads=query.shape[1],
        queries=query.shape[2],
        head_dim=query.shape[3],
        key_heads=key.shape[1],
        keys=keys,
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        packed=inputs in PACKED,
        output_layout=output,
    )


def is_prefix_sum(lengths: Sequence[int]) -> bool:
    """Whether the numbers begin at 0 or more and never go down."""
    return all(low <= high for low, high in zip([0, *lengths], lengths, strict=False))
