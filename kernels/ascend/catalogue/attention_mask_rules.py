"""What the vendor's documents, and its known faults, ask of the masks of its fused inference attention."""

from __future__ import annotations

import torch

from porter.kernels.ascend.catalogue.attention_layouts import COMPRESSED, Geometry, Names
from porter.kernels.ascend.catalogue.attention_rules import on
from porter.kernels.ascend.catalogue.rules import that
from porter.kernels.ascend.catalogue.vendor_op import Call, Rule


def mask_rules(names: Names) -> tuple[Rule, ...]:
    """Which masks go with which sparse_mode; what the mask means stands in the operator's note."""
    return (*_mode_rules(), *_silent_faults(names), _shape_rule(names))


def _mode_rules() -> tuple[Rule, ...]:
    return (
        that("sparse_mode 0, 1, 2, 3 or 4", lambda c: c["sparse_mode"] in range(5), "sparse_mode"),
        that(
            f"the compressed mask, {COMPRESSED} x {COMPRESSED}, with sparse_mode 2, 3 and 4",
            lambda c: c["sparse_mode"] < 2 or (c["atten_mask"] is not None and _is_compressed(c["atten_mask"])),
            "sparse_mode",
            "atten_mask",
        ),
        that(
            "an atten_mask with sparse_mode 1",
            lambda c: c["sparse_mode"] != 1 or c["atten_mask"] is not None,
            "sparse_mode",
        ),
    )


def _silent_faults(names: Names) -> tuple[Rule, ...]:
    """Calls that the operator accepts and answers wrongly."""
    return (
        on(
            names,
            "sparse_mode 0 for one query without rope: the operator reads no other, so a window or a causal mask would "
            "be dropped in silence",
            lambda c, g: g.packed or g.queries != 1 or c["query_rope"] is not None or c["sparse_mode"] == 0,
            "query",
            "sparse_mode",
        ),
        on(
            names,
            "for one query no atten_mask of rank 3 or 4: it is accepted and then ignored beyond key 512 "
            "(vllm-ascend issue 15503); pass [B, S], or pse_shift with every head",
            lambda c, g: g.packed or g.queries != 1 or _is_narrow(c),
            "query",
            "atten_mask",
        ),
        on(
            names,
            "sparse_mode 3 or 4 in packed layouts: without a mask the output is the plain mean of the values "
            "(vllm-ascend issue 13699)",
            lambda c, g: not g.packed or c["sparse_mode"] in (3, 4),
            "input_layout",
            "sparse_mode",
        ),
    )


def _shape_rule(names: Names) -> Rule:
    return on(
        names,
        "an atten_mask (1, Q, S), (B, 1, Q, S) or (1, 1, Q, S), or (Q, S) without rope, of the queries and keys or "
        "these rounded up to 16 or 32",
        lambda c, g: c["sparse_mode"] >= 2 or c["atten_mask"] is None or _full_mask(c, g),
        "atten_mask",
        "query",
        "key",
    )


def _is_compressed(mask: torch.Tensor) -> bool:
    side = (COMPRESSED, COMPRESSED)
    return tuple(mask.shape) in (side, (1, *side), (1, 1, *side))


def _is_narrow(call: Call) -> bool:
    mask = call["atten_mask"]
    return mask is None or call["sparse_mode"] >= 2 or (mask.dim() == 2 and call["block_table"] is None)


def _full_mask(call: Call, sizes: Geometry) -> bool:
    mask = call["atten_mask"]
    rows, columns = ({n, -(-n // 16) * 16, -(-n // 32) * 32} for n in (sizes.queries, sizes.keys))
    if mask.dim() == 2:
        allowed = {sizes.batch} if sizes.queries == 1 else rows
        return call["query_rope"] is None and mask.shape[0] in allowed and mask.shape[1] in columns
    if mask.dim() not in (3, 4) or mask.shape[-2] not in rows or mask.shape[-1] not in columns:
        return False
    leading = tuple(mask.shape[:-2])
    return leading in ((1,), (1, 1), (sizes.batch, 1))
