"""Memory of one card: weights by kind, cache, and the workspace of a forward, each with its arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from porter.chips.catalogue import Chip
from porter.kernels.ascend.catalogue.vendor_op import A2, A3
from porter.models.auto_class import text_config
from porter.parallel_layout import Held, Layout, experts_of
from porter.plan import EXPERTS_CHOSEN, attending_layers, head_dim_of, kv_bytes_per_token
from porter.plan_schemes import Format, Storage, held_as

RESERVE = 0.10
"""Share of a card's memory that is left to the driver, the framework and fragmentation: what vLLM leaves by default."""
CHUNK = 2048
"""Tokens of a prompt that one forward takes on a card."""
HCCL_BUFFER = 200_000_000
"""Bytes of one communication domain's buffer where HCCL_BUFFSIZE is not set: the vendor's default of 200 MB."""


@dataclass(frozen=True)
class Worked:
    """A figure with the arithmetic that gives it, numbers put in; after a semicolon, a remark."""

    name: str
    value: float
    unit: str
    arithmetic: str


@dataclass(frozen=True)
class Load:
    """What a plan is for: `batch` sequences at once over all cards, each `context` tokens long."""

    context: int
    batch: int

    def sequences(self, layout: Layout) -> int:
        """Sequences that one card attends to."""
        return -(-self.batch // layout.dp)


@dataclass(frozen=True)
class Stored:
    """A kind of parameter with the format that one card holds it in; `called_for` is the scheme's own."""

    held: Held
    form: Format
    called_for: Format

    @property
    def bytes(self) -> float:
        """Bytes on one card."""
        return self.form.bytes_of(self.held)


def stored(rows: Sequence[Held], storage: Storage, chip: Chip) -> tuple[Stored, ...]:
    """Each kind of parameter with its format: vectors are never quantized."""
    found = []
    for row in rows:
        taken = len(row.whole) > 1 and row.module in storage.formats
        form = storage.formats[row.module] if taken else storage.plain
        found.append(Stored(row, held_as(form, chip), form))
    return tuple(found)


def weights_by_kind(rows: Sequence[Stored]) -> tuple[Worked, ...]:
    """Bytes of one card's weights, kind by kind, small ones of a kind counted together."""
    result = []
    for kind in dict.fromkeys(row.held.kind for row in rows):
        mine = sorted((row for row in rows if row.held.kind == kind), key=lambda row: -row.bytes)
        shown = [f"{_leaf(r.held.name)} {r.form.arithmetic(r.held)}" for r in mine if r.bytes > 1e7 or r is mine[0]]
        rest = mine[len(shown) :]
        if rest:
            shown.append(f"{sum(r.bytes for r in rest) / 1e6:.4g} MB of others")
        result.append(Worked(kind, sum(r.bytes for r in mine), "bytes", " + ".join(shown)))
    return tuple(result)


def cache(config: Any, local: Any, layout: Layout, load: Load, state: int, width: int) -> tuple[Worked, ...]:
    """Cache bytes of one card: per token, per sequence (states of linear attention), and of the whole load."""
    per_token = kv_bytes_per_token(local, width)
    sequences = load.sequences(layout)
    rows = [Worked("cache of one token", per_token, "bytes", _per_token(config, local, layout, width))]
    if state:
        rows.append(Worked("states of one sequence", state, "bytes", _states(local, width)))
    total = sequences * (load.context * per_token + state)
    text = f"{sequences} sequences x ({load.context} tokens x {per_token} B" + (f" + {state} B)" if state else ")")
    if layout.dp > 1:
        text += f"; {load.batch} sequences over {layout.dp} groups of cards"
    return (*rows, Worked("cache", total, "bytes", text))


def _per_token(config: Any, local: Any, layout: Layout, width: int) -> str:
    text, mine = text_config(config), text_config(local)
    layers = attending_layers(text)
    if getattr(text, "kv_lora_rank", None):
        values = f"{text.kv_lora_rank} latent + {text.qk_rope_head_dim} rope"
        if getattr(text, "index_head_dim", None):
            values += f" + {text.index_head_dim} of the indexer"
        return f"{layers} layers x ({values}) x {width} B" + (
            "; the same on every card of a TP group" * (layout.tp > 1)
        )
    return f"{layers} layers x 2 x {mine.num_key_value_heads} KV heads x {head_dim_of(mine)} x {width} B"


def _states(local: Any, width: int) -> str:
    text = text_config(local)
    layers = sum(kind == "linear_attention" for kind in text.layer_types)
    heads, key, value = text.linear_num_value_heads, text.linear_key_head_dim, text.linear_value_head_dim
    channels = 2 * text.linear_num_key_heads * key + heads * value
    window = text.linear_conv_kernel_dim
    return f"{layers} layers x (4 B x {heads} heads x {key} x {value} + {width} B x {window} x {channels} channels)"


def workspace(
    rows: Sequence[Held], config: Any, layout: Layout, load: Load, chip: Chip, width: int
) -> tuple[Worked, ...]:
    """Bytes beside weights and cache: activations of a chunk of a prompt, logits, and communication buffers."""
    text = text_config(config)
    hidden, tokens = text.hidden_size, min(CHUNK, load.context)
    outer = [
        r.local[0] for r in rows if r.kind not in ("embedding", "output head", "routed experts") and len(r.local) == 2
    ]
    widest = max(outer, default=hidden)
    result = [
        Worked(
            "activations of a chunk",
            tokens * (4 * hidden + 1.5 * widest) * width,
            "bytes",
            f"{tokens} tokens x (4 x {hidden} hidden + 1.5 x {widest} widest output) x {width} B",
        )
    ]
    if experts := experts_of(config):
        chosen = chosen_of(text)
        inner = next(r.local[-1] for r in rows if r.name.endswith("experts.down_proj"))
        share = tokens * layout.dp * chosen / layout.ep
        result.append(
            Worked(
                "rows of routed experts",
                share * (2 * hidden + 3 * inner) * width,
                "bytes",
                f"{tokens} tokens x {layout.dp} groups x {chosen} experts / EP {layout.ep}"
                f" x (2 x {hidden} + 3 x {inner}) x {width} B; {share:g} rows, were the {experts} experts balanced",
            )
        )
    vocabulary = next(r.local[0] for r in rows if r.kind in ("output head", "embedding"))
    sequences = load.sequences(layout)
    result.append(
        Worked("logits", sequences * vocabulary * 4, "bytes", f"{sequences} sequences x {vocabulary} x 4 B; in float32")
    )
    return (*result, *_buffers(config, layout, load, chip))


def chosen_of(text: Any) -> int:
    """Routed experts that one token passes."""
    return next(int(n) for name in EXPERTS_CHOSEN if isinstance(n := getattr(text, name, None), int))


def _buffers(config: Any, layout: Layout, load: Load, chip: Chip) -> tuple[Worked, ...]:
    result = []
    if layout.tp > 1:
        result.append(Worked("buffer of the TP domain", HCCL_BUFFER, "bytes", "200 MB; HCCL_BUFFSIZE's default"))
    if layout.ep > 1:
        result.append(_dispatch_buffer(text_config(config), experts_of(config), layout, load, chip))
    return tuple(result)


def _dispatch_buffer(text: Any, experts: int, layout: Layout, load: Load, chip: Chip) -> Worked:
    """The vendor's formula for npu_moe_distribute_dispatch_v2's domain (page of that operator, "fullmesh")."""
    rows, hidden, chosen = -(-load.batch // layout.cards), text.hidden_size, chosen_of(text)
    local = experts // layout.ep
    if chip.name == A3:
        cell, sent = _up(_up(2 * hidden, 32) + 64, 512), _up(2 * hidden, 512)
        need = 2 * (local * rows * layout.ep * cell + chosen * rows * sent)
        formula = f"2 x ({local} experts x {rows} tokens x {layout.ep} x {cell} B + {chosen} x {rows} x {sent} B)"
    else:
        need = 2 * (rows * layout.ep * min(local, chosen) * hidden * 2 + 2 * 2**20)
        formula = f"2 x ({rows} tokens x {layout.ep} x min({local}, {chosen}) x {hidden} x 2 B + 2 MiB)"
    remark = "" if chip.name in (A2, A3) else ", by the formula of the 910B: none is published for this chip"
    worked = f"max({formula}, 200 MB); HCCL_BUFFSIZE's default at least{remark}"
    return Worked("buffer of the EP domain", max(need, HCCL_BUFFER), "bytes", worked)


def _up(value: int, to: int) -> int:
    return -(-value // to) * to


def _leaf(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    return ".".join(parts[-2:]) if "experts" in name else parts[-1]
