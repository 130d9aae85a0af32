"""Recognising a permutation of rows, columns or experts, and saying which known mistake it is."""

from __future__ import annotations

from typing import Any

import torch

from porter.alignment.drift import Drift

TOLERANCE = 1e-3
"""Sorted projections may differ by this share of their spread (storage rounding); the distance after decides anyway."""


def matching_order(source: torch.Tensor, candidate: torch.Tensor, dim: int) -> torch.Tensor | None:
    """The order with candidate = source.index_select(dim, order), if there is one that is not the identity.

    Slices are matched by their projections on one fixed random direction, sorted: O(n log n), no pairwise distances.
    """
    if source.shape != candidate.shape or source.shape[dim] < 2:
        return None
    size = source.shape[dim]
    rows, others = source.movedim(dim, 0).reshape(size, -1), candidate.movedim(dim, 0).reshape(size, -1)
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(rows.shape[1], generator=generator, dtype=torch.float64).to(rows.device)
    projected, wanted = rows.to(torch.float64) @ direction, others.to(torch.float64) @ direction
    (sorted_source, from_source), (sorted_wanted, from_wanted) = projected.sort(), wanted.sort()
    if float((sorted_source - sorted_wanted).norm()) > TOLERANCE * float(sorted_source.norm()):
        return None
    order = torch.empty_like(from_source)
    order[from_wanted] = from_source
    return None if torch.equal(order, torch.arange(len(order), device=order.device)) else order


def block_of(order: torch.Tensor) -> int:
    """The largest block length b such that the permutation moves whole blocks of b."""
    places = torch.arange(len(order), device=order.device)
    size = len(order)
    for block in (b for b in range(size, 0, -1) if size % b == 0):
        blocks = order.view(-1, block)
        starts = blocks[:, :1]
        if bool((starts % block == 0).all()) and torch.equal(blocks, starts + places[:block]):
            return block
    return 1


def is_rope_style(order: torch.Tensor, head_dim: int) -> bool:
    """Whether within each head the rows go from halves to interleaved pairs or back."""
    if head_dim < 4 or len(order) % head_dim or head_dim % 2:
        return False
    index = torch.arange(head_dim, device=order.device)
    expected = (index.view(2, -1).t().reshape(-1), index.view(-1, 2).t().reshape(-1))
    heads = order.view(-1, head_dim)
    base = torch.arange(len(heads), device=order.device)[:, None] * head_dim
    return any(torch.equal(heads, base + style) for style in expected)


def classify(drift: Drift, name: str, order: torch.Tensor, dim: int, dims: int) -> tuple[str, str]:
    """(cause kind, what it means) of the permutation `order` along `dim` of the parameter `name`."""
    config: Any = drift.config
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    head_dim = int(getattr(config, "head_dim", 0) or (config.hidden_size // heads if heads else 0))
    size, block = len(order), block_of(order)
    axis = "experts" if dims == 3 and dim == 0 else ("rows" if dim == dims - 2 or dims == 1 else "columns")
    gate = ".gate." in f".{name}" or name.endswith("gate.weight") or "e_score_correction_bias" in name
    if axis == "experts" or (gate and axis == "rows"):
        shift = int(order[0])
        if torch.equal(order, torch.arange(size, device=order.device).roll(-shift)):
            return "expert-permutation", f"its experts are shifted by {shift}: expert i holds the source's i + {shift}"
        return "expert-permutation", f"its experts are permuted, expert 0 holds the source's {shift}: restore the order"
    if any(part in name for part in ("q_proj", "k_proj")) and axis == "rows" and is_rope_style(order, head_dim):
        return (
            "rope-style",
            "rows of each head are regrouped between half and interleaved rope pairs: undo it, or set the style",
        )
    if "gate_up" in name and axis == "rows" and size % 2 == 0 and block == size // 2:
        return "gate-up-swapped", "its two halves, gate and up, are exchanged: gate comes first"
    if head_dim and block % head_dim == 0 and any(part in name for part in ("k_proj", "v_proj")):
        return (
            "kv-head-order",
            f"its key/value heads are permuted, head 0 holds the source's {int(order[0]) // head_dim}",
        )
    if (
        head_dim
        and block % head_dim == 0
        and any(part in name for part in ("q_proj", "o_proj", "q_b_proj", "kv_b_proj"))
    ):
        return "head-permutation", f"its heads are permuted, head 0 holds the source's {int(order[0]) // head_dim}"
    unit = f"in blocks of {block}" if block > 1 else "one by one"
    return (
        "weight-permuted",
        f"its {axis} are permuted {unit}, the first is the source's {int(order[0])}: restore the order",
    )
