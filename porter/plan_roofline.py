"""What a card reads, multiplies and sends in a step, and the tokens per second that its memory and units allow.

Bounds, not predictions: bandwidth and peak in full, routed experts balanced, no time for communication, whose bytes are
stated. A multiply-add counts as two operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from porter.chips.catalogue import Chip
from porter.models.auto_class import text_config
from porter.parallel_layout import Layout, experts_of
from porter.plan import attending_layers, head_dim_of, kv_bytes_per_token
from porter.plan_memory import Load, Stored, Worked, chosen_of

READ_BY_ROW = "embedding"
"""The kind of weights of which a token reads one row."""


@dataclass(frozen=True)
class Roofline:
    """One regime: every figure with its arithmetic; `bound` is "memory" or "compute", `tokens_per_second` of all cards.

    None where the chip's file gives no bandwidth, or no peak in a dtype that the products take.
    """

    regime: str
    figures: tuple[Worked, ...]
    bound: str | None
    tokens_per_second: float | None


@dataclass(frozen=True)
class Card:
    """What the arithmetic of one card starts from. `local` is the config with the card's own heads and widths."""

    config: Any
    local: Any
    layout: Layout
    chip: Chip
    rows: tuple[Stored, ...]
    state: int
    width: int

    def elements(self, routed: bool) -> dict[str, int]:
        """Weight elements that every token multiplies by, by the dtype of the chip's products; or those of one routed
        expert over all layers."""
        result: dict[str, int] = {}
        for row in self.rows:
            if len(row.held.local) < 2 or row.held.kind == READ_BY_ROW:
                continue
            if (row.held.kind == "routed experts") == routed:
                count = row.held.elements // (row.held.local[0] if routed else 1)
                result[row.form.peak] = result.get(row.form.peak, 0) + count
        return result

    def size(self, kind: str | None = None) -> float:
        """Bytes of the weights of a kind; without one, of all that every token reads."""
        aside = ("routed experts", READ_BY_ROW)
        return sum(r.bytes for r in self.rows if (r.held.kind == kind if kind else r.held.kind not in aside))

    def kinds_read(self) -> str:
        """`size()` as the sum of its kinds."""
        sizes = {row.held.kind: self.size(row.held.kind) for row in self.rows}
        aside = ("routed experts", READ_BY_ROW)
        return f"({' + '.join(f'{size / 1e9:.4f} {kind}' for kind, size in sizes.items() if kind not in aside)}) GB"

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return next((r.held.layers for r in self.rows if r.held.kind == "routed experts"), 0)


def decode(card: Card, load: Load) -> Roofline:
    """One token for each of `load.batch` sequences."""
    sequences = load.sequences(card.layout)
    figures = [Worked("weights read, without experts", card.size(), "bytes", card.kinds_read())]
    if card.moe_layers:
        figures.append(_experts_read(card, load.batch))
    figures += _cache_read(card, load, sequences)
    total = sum(f.value for f in figures)
    parts = " + ".join(f"{f.value / 1e9:.4f}" for f in figures)
    figures.append(Worked("bytes read", total, "bytes", f"({parts}) GB"))
    operations = _operations(card, sequences, load.batch)
    operations += [_attention(card, sequences, load.context, "decode")]
    return _roofline(f"decode, batch {load.batch}", card, figures, total, operations, load.batch, sequences)


def prefill(card: Card, load: Load) -> Roofline:
    """Prompts of `load.context` tokens, one on each group of cards, bound by operations alone."""
    tokens = load.context
    operations = _operations(card, tokens, tokens * card.layout.dp, head=False)
    operations += [_attention(card, tokens, tokens / 2, "prefill")]
    return _roofline(f"prefill of {tokens} tokens", card, [], 0.0, operations, tokens * card.layout.dp, tokens)


def _roofline(
    regime: str,
    card: Card,
    figures: list[Worked],
    read: float,
    operations: list[tuple[str, Worked]],
    tokens: int,
    rows: int,
) -> Roofline:
    bandwidth = card.chip.bandwidth_bytes_per_second()
    seconds, terms = 0.0, []
    for peak, work in operations:
        rate = card.chip.peak_per_second(peak)
        if rate is None or bandwidth is None:
            sent = _sent(card, rows, tokens)
            return Roofline(regime, (*figures, *(w for _, w in operations), *sent), None, None)
        seconds += work.value / rate
        terms.append(f"{work.value / 1e12:.4g} / {rate / 1e12:.4g} T/s {peak}")
    memory = read / bandwidth if bandwidth else 0.0
    compute = Worked("time of the products", seconds * 1e3, "ms", " + ".join(terms))
    figures = [*figures, *(w for _, w in operations)]
    if read:
        text = f"{read / 1e9:.5g} GB / ({bandwidth / 1e9:.5g} GB/s)"  # type: ignore[operator]
        figures.append(Worked("time of the reads", memory * 1e3, "ms", text))
    figures += [compute, *_sent(card, rows, tokens)]
    slower = max(memory, seconds)
    return Roofline(regime, tuple(figures), "memory" if memory > seconds else "compute", tokens / slower)


def _experts_read(card: Card, batch: int) -> Worked:
    """The expected number of a card's experts that any of `batch` tokens is routed to, tokens choosing alike and
    independently: local (1 - (1 - k/E)^batch); the busiest card reads at least ceil(k / EP)."""
    text, experts = text_config(card.config), experts_of(card.config)
    chosen, local = chosen_of(text), experts // card.layout.ep
    expected = local * (1 - (1 - chosen / experts) ** batch)
    least = -(-chosen // card.layout.ep)
    read = max(expected, least)
    each = card.size("routed experts") / local
    formula = f"max({least}, {local} x (1 - (1 - {chosen}/{experts})^{batch})) experts x {each / 1e6:.6g} MB"
    remark = f"{read:.4g} of {local} in each of {card.moe_layers} layers"
    return Worked("experts read", read * each, "bytes", f"{formula}; {remark}")


def _cache_read(card: Card, load: Load, sequences: int) -> list[Worked]:
    per_token, text = kv_bytes_per_token(card.local, card.width), text_config(card.config)
    seen, formula = load.context * per_token, f"{load.context} tokens x {per_token} B"
    top = getattr(text, "index_topk", None)
    if top and getattr(text, "kv_lora_rank", None) and top < load.context:
        layers = text.num_hidden_layers
        keys, latents = layers * text.index_head_dim * card.width, layers * (text.kv_lora_rank + text.qk_rope_head_dim)
        latents *= card.width
        seen, formula = load.context * keys + top * latents, f"{load.context} x {keys} B of keys + {top} x {latents} B"
    if card.state:
        seen, formula = seen + 2 * card.state, f"{formula} + 2 x {card.state} B of states"
    worked = f"{sequences} sequences x ({formula})" + ("; states are read and written" if card.state else "")
    return [Worked("cache read", sequences * seen, "bytes", worked)]


def _operations(card: Card, tokens: int, everywhere: int, head: bool = True) -> list[tuple[str, Worked]]:
    """Operations of the products with weights: `tokens` pass this card's, `everywhere` are routed over all cards."""
    result = []
    without = 0 if head else sum(r.held.elements for r in card.rows if r.held.kind == "output head")
    for peak, elements in card.elements(routed=False).items():
        count = elements - (without if peak == _head_peak(card) else 0)
        if not count:
            continue
        text = f"2 x {count:,} weights x {tokens} tokens"
        result.append((peak, Worked(f"products in {peak}", 2.0 * count * tokens, "operations", text)))
    for peak, elements in card.elements(routed=True).items():
        chosen = chosen_of(text_config(card.config))
        rows = everywhere * chosen / card.layout.ep
        text = f"2 x {elements:,} weights of an expert x {everywhere} tokens x {chosen} / EP {card.layout.ep}"
        result.append((peak, Worked(f"routed experts in {peak}", 2.0 * elements * rows, "operations", text)))
    return result


def _head_peak(card: Card) -> str | None:
    return next((r.form.peak for r in card.rows if r.held.kind == "output head"), None)


def _attention(card: Card, queries: int, keys: float, regime: str) -> tuple[str, Worked]:
    """Scores and weighted sums: 2 (Dk + Dv) operations per query, key and head. Latent attention decodes absorbed, over
    latents, its matrices counted with the weights; it prefills expanded. Indexers score every key with every head."""
    text, mine = text_config(card.config), text_config(card.local)
    layers, heads = attending_layers(text), mine.num_attention_heads
    indexer, formula = 0.0, ""
    if rank := getattr(text, "kv_lora_rank", None):
        absorbed = regime == "decode" or (getattr(text, "index_topk", None) or keys) < keys
        own = (rank + text.qk_rope_head_dim, rank)
        key, value = own if absorbed else (text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim)
        if top := getattr(text, "index_topk", None):
            indexer = layers * queries * keys * 2 * text.index_n_heads * text.index_head_dim
            formula = (
                f" + {layers} x {queries} x {keys:g} x 2 x {text.index_n_heads} x {text.index_head_dim} of indexers"
            )
            if regime == "decode":
                keys = min(keys, top)
            elif top < queries:
                # A prompt's first queries see fewer keys than are chosen.
                keys = top * (1 - top / (2 * queries))
    else:
        key = value = head_dim_of(mine)
    count = layers * queries * keys * heads * 2 * (key + value) + indexer
    arithmetic = f"{layers} layers x {queries} queries x {keys:g} keys x {heads} heads x 2 x ({key} + {value}){formula}"
    return "bfloat16", Worked("attention in bfloat16", count, "operations", arithmetic)


def _sent(card: Card, rows: int, tokens: int) -> list[Worked]:
    """Bytes that one card sends in a step: a ring all-reduce sends 2 (n - 1) / n of its message."""
    text, layout = text_config(card.config), card.layout
    layers, hidden, result = text.num_hidden_layers, text.hidden_size, []
    if layout.tp > 1:
        dense = layers - card.moe_layers
        shared = any(r.held.kind == "shared experts" for r in card.rows)
        sums = 1 + layers + dense + (card.moe_layers if layout.ep == 1 or layout.expert_tp > 1 or shared else 0)
        message, share = rows * hidden * card.width, 2 * (layout.tp - 1) / layout.tp
        formula = f"{sums} all-reduces x 2 x {layout.tp - 1}/{layout.tp} x {rows} rows x {hidden} x {card.width} B"
        result.append(Worked("sent by all-reduces", sums * share * message, "bytes", formula))
    if layout.ep > 1:
        chosen = chosen_of(text)
        out = _routed_width(card)
        mean = tokens / layout.cards
        away = (layout.ep - 1) / layout.ep
        formula = (
            f"{card.moe_layers} layers x {tokens} tokens / {layout.cards} cards x {chosen} x {hidden}"
            f" x ({out:g} out + {card.width} back) B x {layout.ep - 1}/{layout.ep} elsewhere"
        )
        sent = card.moe_layers * mean * chosen * hidden * (out + card.width) * away
        result.append(Worked("sent to other cards' experts and back", sent, "bytes", formula))
    return result


def _routed_width(card: Card) -> int:
    """Bytes of an activation on its way to an expert: one where the experts multiply in eight bits."""
    peaks = {r.form.peak for r in card.rows if r.held.kind == "routed experts"}
    return 1 if peaks <= {"int8", "float8_e4m3fn", "mxfp4"} else card.width


def decode_regimes(card: Card, load: Load) -> Sequence[Roofline]:
    """Decoding one sequence, decoding `load.batch`, and prefill."""
    alone = Load(load.context, 1)
    return [decode(card, alone), *([decode(card, load)] if load.batch > 1 else []), prefill(card, load)]
