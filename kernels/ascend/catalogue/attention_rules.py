"""What the vendor's documents ask of the layouts, heads, lengths and masks of its fused inference attention."""

from __future__ import annotations

from collections.abc import Callable

from porter.kernels.ascend.catalogue.attention_layouts import (
    INPUT_RANK,
    Geometry,
    Names,
    geometry,
    is_prefix_sum,
    key_heads_of,
    split_layout,
)
from porter.kernels.ascend.catalogue.rules import that
from porter.kernels.ascend.catalogue.vendor_op import Call, Rule

LAYOUTS = (
    "BSH",
    "BSND",
    "BNSD",
    "BNSD_BSND",
    "BSH_NBSD",
    "BSND_NBSD",
    "BNSD_NBSD",
    "TND",
    "TND_NTD",
    "NTD_TND",
)
PACKED_SIZES = ((64, 64), (128, 128), (192, 192), (192, 128))
"""Head sizes of keys and of values that packed layouts take, as the operator's own refusal lists them (vllm-ascend
pull request 9632)."""

Holds = Callable[[Call, Geometry], bool]


def on(names: Names, says: str, holds: Holds, *shown: str) -> Rule:
    """A constraint on the sizes of a call."""
    return that(says, lambda call: holds(call, geometry(call, names)), *shown)


def layout_rules(names: Names) -> tuple[Rule, ...]:
    """The layout is a documented one and the tensors have its ranks and its heads."""
    return (
        that(f"input_layout to be one of {', '.join(LAYOUTS)}", lambda c: c["input_layout"] in LAYOUTS, "input_layout"),
        that("query, key and value of the ranks of input_layout", _ranks, "query", "key", "value", "input_layout"),
        that(
            f"the last dimension to be {names.heads} heads (the keys': {names.key_heads})",
            lambda call: _divisible(call, names),
            "query",
            "key",
            names.heads,
            names.key_heads,
        ),
        on(
            names,
            f"{names.heads} and {names.key_heads} to be the heads of query and key (0: as many as the query's)",
            lambda c, g: g.heads == c[names.heads] and g.key_heads == key_heads_of(c, names),
            "query",
            "key",
            names.heads,
            names.key_heads,
        ),
    )


def size_rules(names: Names) -> tuple[Rule, ...]:
    """The heads, head sizes, queries and keys are within the operator's limits."""
    return (
        on(
            names,
            "at most 256 heads, a multiple of the keys' and at most 64 times as many (128 beside rope)",
            lambda c, g: (
                g.heads <= 256
                and g.heads % g.key_heads == 0
                and g.heads // g.key_heads <= (64 if c["query_rope"] is None else 128)
            ),
            names.heads,
            names.key_heads,
        ),
        on(
            names,
            "query and key of one head size, at most 512 and a multiple of 16",
            lambda c, g: g.head_dim == g.key_dim and g.head_dim <= 512 and g.head_dim % 16 == 0,
            "query",
            "key",
        ),
        on(
            names,
            "key and value of one shape, except in packed layouts",
            lambda c, g: c["key"].shape == c["value"].shape or (g.packed and g.head_dim != 512),
            "key",
            "value",
        ),
        on(
            names,
            "more than one query where the output is laid out as BNSD_BSND, and at most 16 where as NBSD",
            _output_layout,
            "query",
            "input_layout",
        ),
        on(
            names,
            "at most 65536 sequences, and at most 262144 keys for one query",
            lambda c, g: g.batch <= 65536 and (g.queries != 1 or g.keys <= 262144),
            "query",
            "key",
        ),
    )


def _ranks(call: Call) -> bool:
    rank = INPUT_RANK[split_layout(call["input_layout"])[0]]
    if call["query"].dim() != rank:
        return False
    if call["block_table"] is not None:
        return call["key"].dim() == call["value"].dim() and call["key"].dim() in (3, 4)
    return bool(call["key"].dim() == call["value"].dim() == rank)


def _divisible(call: Call, names: Names) -> bool:
    heads, key_heads = call[names.heads], key_heads_of(call, names)
    if heads <= 0 or key_heads <= 0:
        return False
    if split_layout(call["input_layout"])[0] == "BSH" and call["query"].shape[-1] % heads:
        return False
    flat = call["key"].dim() == 3 and (call["block_table"] is not None or call["input_layout"].startswith("BSH"))
    return not flat or call["key"].shape[-1] % key_heads == 0 == call["value"].shape[-1] % key_heads


def _output_layout(call: Call, sizes: Geometry) -> bool:
    """vllm-ascend serves MLA with one query in the NBSD layouts (mla_v1.py), so the page's lower limit of 2 holds
    without rope only."""
    layout = call["input_layout"]
    if layout == "BNSD_BSND":
        return sizes.queries != 1
    if layout.endswith("NBSD"):
        return sizes.queries <= 16 and (sizes.queries > 1 or call["query_rope"] is not None)
    return True


def length_rules(names: Names) -> tuple[Rule, ...]:
    """Lengths are those of each sequence, or prefix sums where sequences are packed."""
    both = (names.query_lengths, names.key_lengths)
    return (
        on(
            names,
            "lengths of the sequences as prefix sums, as many for keys as for queries and at most 4096, in packed "
            "layouts (keys in pages: the length of each)",
            lambda c, g: not g.packed or _packed_lengths(c, g, names),
            *both,
            "input_layout",
        ),
        on(
            names,
            "one length, or one for each sequence, none longer than its tensor",
            lambda c, g: (
                g.packed or (_lengths_fit(c[both[0]], g.batch, g.queries) and _lengths_fit(c[both[1]], g.batch, g.keys))
            ),
            *both,
            "query",
            "key",
        ),
    )


def _packed_lengths(call: Call, sizes: Geometry, names: Names) -> bool:
    queries, keys = call[names.query_lengths], call[names.key_lengths]
    if not queries or not keys or len(queries) != len(keys) or len(queries) > 4096:
        return False
    if not is_prefix_sum(queries) or queries[-1] > sizes.queries:
        return False
    if call["block_table"] is not None:
        return all(0 <= length <= sizes.keys for length in keys)
    return is_prefix_sum(keys) and keys[-1] <= sizes.keys


def _lengths_fit(lengths: list[int] | None, batch: int, longest: int) -> bool:
    if lengths is None:
        return True
    return (len(lengths) == 1 or len(lengths) >= batch) and all(0 <= n <= longest for n in lengths)
