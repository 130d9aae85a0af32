"""What DeepSeek's sparse operators share: layouts of queries and keys, lengths of sequences, block tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from porter.kernels.ascend.catalogue.rules import dtypes, one_of, size, that
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, Call, Rule

UNBOUNDED = 2**63 - 1
RANKS = {"BSND": 4, "TND": 3, "PA_BSND": 4}


@dataclass(frozen=True)
class Span:
    """One sequence of a batch: its query rows in the flattened queries, its number of keys, and its batch index."""

    batch: int
    rows: slice
    keys: int

    @property
    def queries(self) -> int:
        """The number of valid queries."""
        return int(self.rows.stop - self.rows.start)

    def visible(self, query: int, causal: bool) -> int:
        """How many keys, from the first, query `query` of this sequence may see: causal means aligned to the end."""
        return max(0, self.keys - self.queries + query + 1) if causal else self.keys


def spans(call: Call, lengths: str) -> Iterator[Span]:
    """The sequences of a call; `lengths` ("key" or "kv") completes the name of the keys' lengths."""
    queries, keys = _list(call["actual_seq_lengths_query"]), _list(call[f"actual_seq_lengths_{lengths}"])
    if call["layout_query"] == "TND":
        assert queries is not None
        starts = [0, *queries[:-1]]
        rows = [slice(a, b) for a, b in zip(starts, queries, strict=True)]
    else:
        batch, length = call["query"].shape[:2]
        rows = [slice(i * length, i * length + n) for i, n in enumerate(queries or [length] * batch)]
    if call["layout_" + lengths] == "TND":
        assert keys is not None
        keys = [b - a for a, b in zip([0, *keys[:-1]], keys, strict=True)]
    yield from (
        Span(i, r, n) for i, (r, n) in enumerate(zip(rows, keys or [call["key"].shape[1]] * len(rows), strict=True))
    )


def gathered(call: Call, name: str, span: Span, lengths: str) -> torch.Tensor:
    """The valid rows [keys, ...] of the tensor `name` of one sequence, by its layout and block table; one head."""
    layout = call["layout_" + lengths]
    tensor: torch.Tensor = call[name]
    if layout == "PA_BSND":
        blocks = -(-span.keys // tensor.shape[1])
        return tensor[call["block_table"][span.batch, :blocks].long(), :, 0].flatten(0, 1)[: span.keys]
    if layout == "BSND":
        return tensor[span.batch, : span.keys, 0]
    stop = int(call[f"actual_seq_lengths_{lengths}"][span.batch])
    return tensor[stop - span.keys : stop, 0]


def query_heads(*allowed: int, chips: Sequence[str] = ()) -> Rule:
    """The query has one of these numbers of heads."""
    text = f"of {', '.join(map(str, allowed[:-1]))} or {allowed[-1]} heads"
    return size("query", -2, text, lambda n: n in allowed, chips)


def layout_rules(lengths: str) -> tuple[Rule, ...]:
    """Layouts, ranks, lengths and block table, for keys whose layout and lengths end in `lengths`."""
    layout = f"layout_{lengths}"
    return (
        one_of("layout_query", "BSND", "TND"),
        one_of(layout, "BSND", "TND", "PA_BSND"),
        that(
            f"{layout} to be that of the queries, unless PA_BSND",
            lambda call: call[layout] in ("PA_BSND", call["layout_query"]),
            "layout_query",
            layout,
        ),
        that(
            "query of as many dimensions as its layout",
            lambda call: call["query"].dim() == RANKS[call["layout_query"]],
            "query",
            "layout_query",
        ),
        that(
            "key of as many dimensions as its layout, with one head, before the last",
            lambda call: call["key"].dim() == RANKS[call[layout]] and call["key"].shape[-2] == 1,
            "key",
            layout,
        ),
        that(
            "query and key without an empty dimension",
            lambda call: call["query"].numel() > 0 and call["key"].numel() > 0,
            "query",
            "key",
        ),
        *_lengths_and_pages(layout, lengths),
        one_of("sparse_mode", 0, 3),
        one_of("pre_tokens", UNBOUNDED),
        one_of("next_tokens", UNBOUNDED),
    )


def _lengths_and_pages(layout: str, lengths: str) -> tuple[Rule, ...]:
    actual = f"actual_seq_lengths_{lengths}"

    def paged(call: Call) -> bool:
        return bool(call[layout] == "PA_BSND")

    return (
        dtypes(f"actual_seq_lengths_query {actual} block_table", "i32/i32/i32"),
        that(
            "actual_seq_lengths_query where layout_query is TND",
            lambda call: call["layout_query"] != "TND" or call["actual_seq_lengths_query"] is not None,
            "layout_query",
            "actual_seq_lengths_query",
        ),
        that(
            f"{actual} where {layout} is TND or PA_BSND",
            lambda call: call[layout] == "BSND" or call[actual] is not None,
            layout,
            actual,
        ),
        that(f"one length per sequence in {actual}, and as many as there are", lambda c: _batches(c, lengths), actual),
        that(
            "block_table [sequences, blocks] with PA_BSND and only there",
            lambda c: c["block_table"] is None if not paged(c) else _is_table(c, actual),
            "block_table",
            layout,
        ),
        that(
            "blocks of a multiple of 16 tokens, 1024 at most",
            lambda c: not paged(c) or (c["key"].shape[1] % 16 == 0 and c["key"].shape[1] <= 1024),
            "key",
        ),
    )


def contiguous_keys(names: Sequence[str], lengths: str, apart: Sequence[str] = (A5,)) -> tuple[Rule, ...]:
    """Keys are contiguous; on the chips `apart` the blocks of PA_BSND may lie apart."""

    def dense(call: Call, blocks_apart: bool) -> bool:
        tensors = [call[name] for name in names if call[name] is not None]
        loose = blocks_apart and call["layout_" + lengths] == "PA_BSND"
        return all(t[0].is_contiguous() if loose else t.is_contiguous() for t in tensors)

    text = f"{', '.join(names)} contiguous"
    strict = tuple(chip for chip in (A2, A3, A5) if chip not in apart)
    return (
        that(text, lambda call: dense(call, False), *names, chips=strict),
        that(f"{text}, apart from blocks of PA_BSND", lambda call: dense(call, True), *names, chips=tuple(apart)),
    )


def length_rules(lengths: str) -> tuple[Rule, ...]:
    """What only the values of lengths and block table tell."""
    actual = f"actual_seq_lengths_{lengths}"
    return (
        that(
            "actual_seq_lengths_query as prefix sums that end at the number of tokens with TND, else up to S each",
            lambda c: _sound(c["actual_seq_lengths_query"], c["layout_query"], c["query"]),
            "actual_seq_lengths_query",
            "layout_query",
        ),
        that(
            f"{actual} as prefix sums that end at the number of tokens with TND, else up to S each",
            lambda c: _sound(c[actual], c["layout_" + lengths], c["key"]),
            actual,
            "layout_" + lengths,
        ),
        that(
            "a block_table that reaches as far as each sequence and names existing blocks",
            lambda c: _reaches(c, lengths),
            "block_table",
            actual,
        ),
    )


def _list(lengths: torch.Tensor | None) -> list[int] | None:
    return None if lengths is None else [int(n) for n in lengths.tolist()]


def _batches(call: Call, lengths: str) -> bool:
    keys, queries = call[f"actual_seq_lengths_{lengths}"], call["actual_seq_lengths_query"]
    given = [x for x in (keys, queries) if x is not None]
    counts = {int(x.shape[0]) for x in given if x.dim() == 1}
    if call["layout_query"] == "BSND":
        counts.add(int(call["query"].shape[0]))
    if call["layout_" + lengths] == "BSND":
        counts.add(int(call["key"].shape[0]))
    return all(x.dim() == 1 for x in given) and len(counts) <= 1


def _is_table(call: Call, actual: str) -> bool:
    table, sequences = call["block_table"], call[actual]
    return table is not None and table.dim() == 2 and table.shape[0] == sequences.shape[0]


def _sound(lengths: torch.Tensor | None, layout: str, tensor: torch.Tensor) -> bool:
    values = _list(lengths)
    if values is None or not values:
        return True
    if layout == "TND":
        return values == sorted(values) and values[0] >= 0 and values[-1] == tensor.shape[0]
    return min(values) >= 0 and (layout == "PA_BSND" or max(values) <= tensor.shape[1])


def _reaches(call: Call, lengths: str) -> bool:
    table, key = call["block_table"], call["key"]
    if table is None:
        return True
    for sequence, length in enumerate(_list(call[f"actual_seq_lengths_{lengths}"]) or ()):
        used = table[sequence, : -(-length // key.shape[1])]
        if used.numel() * key.shape[1] < length or bool(((used < 0) | (used >= key.shape[0])).any()):
            return False
    return True
