"""What the vendor's documents ask of its fused inference attention where a bias, pages, packed sequences, rope or a
sink are given."""

from __future__ import annotations

from functools import partial

import torch

from porter.kernels.ascend.catalogue.attention_layouts import COMPRESSED, Geometry, Names
from porter.kernels.ascend.catalogue.attention_rules import PACKED_SIZES, Holds, on
from porter.kernels.ascend.catalogue.rules import that
from porter.kernels.ascend.catalogue.vendor_op import POWERS_OF_TWO, Call, Rule

WITH_ROPE = {
    512: ("BSH", "BSND", "BNSD", "BNSD_NBSD", "BSND_NBSD", "BSH_NBSD", "TND", "TND_NTD"),
    128: ("BSH", "BSND", "TND", "BNSD", "BNSD_BSND", "NTD_TND"),
}
"""The layouts of each head size beside rope."""


def bias_rules(names: Names) -> tuple[Rule, ...]:
    """pse_shift, added to the scores."""
    return (
        on(
            names,
            "a pse_shift (B or 1, all heads, Q, S): with one head for all it is accepted and wrong (vllm-ascend issue "
            "15503)",
            lambda c, g: c["pse_shift"] is None or _full_bias(c["pse_shift"], g),
            "pse_shift",
            "query",
            "key",
        ),
        that(
            "no pse_shift in packed layouts, beside rope or with sparse_mode 2, 3, 4",
            lambda c: (
                c["pse_shift"] is None
                or ("T" not in c["input_layout"] and c["query_rope"] is None and c["sparse_mode"] < 2)
            ),
            "pse_shift",
            "input_layout",
            "sparse_mode",
        ),
    )


def _full_bias(bias: torch.Tensor, sizes: Geometry) -> bool:
    return (
        bias.dim() == 4
        and bias.shape[0] in (1, sizes.batch)
        and bias.shape[1] == sizes.heads
        and bias.shape[2] >= sizes.queries
        and bias.shape[3] >= sizes.keys
    )


def page_rules(names: Names) -> tuple[Rule, ...]:
    """Keys in pages, found through block_table."""

    def when_paged(says: str, holds: Holds, *shown: str) -> Rule:
        return on(names, says, lambda c, g: c["block_table"] is None or holds(c, g), *shown)

    return (
        when_paged(
            f"{names.key_lengths} beside block_table", lambda c, g: c[names.key_lengths] is not None, names.key_lengths
        ),
        when_paged(
            "block_table int32 [B, pages of the longest]",
            lambda c, g: (
                c["block_table"].dtype == torch.int32
                and c["block_table"].dim() == 2
                and c["block_table"].shape[0] == (len(c[names.query_lengths] or ()) if g.packed else g.batch)
            ),
            "block_table",
            "query",
        ),
        when_paged(
            "a block_size of 16 n up to 512 (packed or beside rope: 1024), of 128 n for more than one query",
            _page_size,
            "block_size",
            "query",
        ),
        when_paged(
            "pages (n, block_size, H) with H at most 65535, or (n, heads, block_size, D) for BNSD and TND",
            lambda c, g: (
                c["key"].shape[-2] == c["block_size"]
                if c["key"].dim() == 4 and c["input_layout"].startswith(("BNSD", "TND"))
                else c["key"].dim() == 3 and c["key"].shape[1] == c["block_size"] and c["key"].shape[2] <= 65535
            ),
            "key",
            "block_size",
            "input_layout",
        ),
    )


def _page_size(call: Call, sizes: Geometry) -> bool:
    size = call["block_size"]
    if sizes.packed or call["query_rope"] is not None:
        return bool(size >= 16 and size % 16 == 0 and size <= 1024)
    step = 16 if sizes.queries == 1 else 128
    return bool(size >= step and size % step == 0 and size <= 512)


def packed_rules(names: Names) -> tuple[Rule, ...]:
    """Sequences one after another, without padding."""
    sizes_taken = ", ".join(f"{d}/{v}" for d, v in PACKED_SIZES)
    return (
        on(
            names,
            f"head sizes of keys and values {sizes_taken} in packed layouts (NTD_TND: 128/128, 192/128; 512 beside "
            "rope alone, 128/128 beside rope else)",
            lambda c, g: not g.packed or _packed_sizes(c, g),
            "query",
            "value",
            "input_layout",
        ),
        on(
            names,
            "inner_precise 0, or 0 and 1 in float16, in packed layouts",
            lambda c, g: (
                not g.packed
                or c["inner_precise"] == 0
                or (c["inner_precise"] == 1 and c["query"].dtype == torch.float16)
            ),
            "inner_precise",
            "query",
        ),
    )


def _packed_sizes(call: Call, sizes: Geometry) -> bool:
    pair, layout = (sizes.head_dim, sizes.value_dim), call["input_layout"]
    if call["query_rope"] is not None:
        return pair in ((512, 512), (128, 128))
    if layout == "NTD_TND":
        return pair in ((128, 128), (192, 128))
    return layout == "TND" and pair in PACKED_SIZES


def rope_rules(names: Names) -> tuple[Rule, ...]:
    """Multi-head latent attention: the rope part of queries and keys beside a head size of 512 or 128."""
    together = that(
        "query_rope and key_rope together or neither",
        lambda c: (c["query_rope"] is None) == (c["key_rope"] is None),
        "query_rope",
        "key_rope",
    )
    return (together, *_rope_sizes(names), *_rope_modes(names))


def _with_rope(names: Names, says: str, holds: Holds, *shown: str) -> Rule:
    return on(names, says, lambda c, g: c["query_rope"] is None or holds(c, g), *shown)


def _rope_sizes(names: Names) -> tuple[Rule, ...]:
    with_rope = partial(_with_rope, names)
    return (
        with_rope("a head size of 512 or 128 beside rope", lambda c, g: g.head_dim in WITH_ROPE, "query"),
        with_rope(
            "a layout of "
            + "; ".join(f"{', '.join(v)} for head size {d}" for d, v in WITH_ROPE.items())
            + " beside rope",
            lambda c, g: c["input_layout"] in WITH_ROPE[g.head_dim],
            "input_layout",
            "query",
        ),
        with_rope(
            "query_rope and key_rope as query and key, with 64 for the head size",
            lambda c, g: (
                _rope_like(c["query"], c["query_rope"], g.head_dim, c[names.heads])
                and _rope_like(c["key"], c["key_rope"], g.head_dim, g.key_heads)
            ),
            "query",
            "query_rope",
            "key",
            "key_rope",
        ),
        with_rope(
            "1, 2, 4, ... 128 heads over one key head for head size 512",
            lambda c, g: g.head_dim != 512 or (g.heads in POWERS_OF_TWO and g.key_heads == 1),
            "query",
            "key",
        ),
    )


def _rope_modes(names: Names) -> tuple[Rule, ...]:
    with_rope = partial(_with_rope, names)
    return (
        with_rope("sparse_mode 0, 3 or 4 beside rope", lambda c, g: c["sparse_mode"] in (0, 3, 4), "sparse_mode"),
        with_rope(
            "no atten_mask but the compressed one beside rope at head size 128",
            lambda c, g: g.head_dim == 512 or c["atten_mask"] is None or c["sparse_mode"] in (3, 4),
            "atten_mask",
            "sparse_mode",
        ),
        with_rope(
            f"no {names.softmax_lse} beside rope at head size 512",
            lambda c, g: g.head_dim != 512 or not c[names.softmax_lse],
            names.softmax_lse,
        ),
    )


def _rope_like(tensor: torch.Tensor, rope: torch.Tensor, head_dim: int, heads: int) -> bool:
    flat = tensor.shape[-1] != head_dim
    last = 64 * heads if flat else 64
    return rope.dtype == tensor.dtype and tuple(rope.shape) == (*tensor.shape[:-1], last)


def value_rules(names: Names) -> tuple[Rule, ...]:
    """What only the tensors' values tell."""
    return (
        that(
            f"the compressed mask to be triu(ones({COMPRESSED}, {COMPRESSED}), 1): True and 1 are masked out, the "
            "opposite of torch",
            lambda c: c["sparse_mode"] < 2 or is_upper(c["atten_mask"]),
            "atten_mask",
        ),
        on(
            names,
            "inner_precise 2 or 3 where a query is masked from every key",
            lambda c, g: (
                c["atten_mask"] is None or c["sparse_mode"] >= 2 or c["inner_precise"] >= 2 or not _dead_rows(c, g)
            ),
            "inner_precise",
            "atten_mask",
        ),
        that("every page of block_table that is read to exist", lambda c: _pages_exist(c, names), "block_table", "key"),
    )


def is_upper(mask: torch.Tensor) -> bool:
    """Whether a compressed mask hides every later key and no other."""
    flat = mask.reshape(COMPRESSED, COMPRESSED).bool()
    return bool(torch.equal(flat, torch.ones_like(flat).triu(1)))


def _dead_rows(call: Call, sizes: Geometry) -> bool:
    return bool(call["atten_mask"].bool()[..., : sizes.queries, : sizes.keys].all(dim=-1).any())


def _pages_exist(call: Call, names: Names) -> bool:
    table = call["block_table"]
    if table is None:
        return True
    lengths = torch.tensor(call[names.key_lengths])
    read = torch.arange(table.shape[1]) * call["block_size"] < lengths.expand(table.shape[0])[:, None]
    pages = table[read]
    return bool(((pages >= 0) & (pages < call["key"].shape[0])).all())
