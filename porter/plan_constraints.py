"""What a layout must meet on an Ascend chip, each with its numbers, the verdict, and who says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from porter.chips.catalogue import Chip
from porter.kernels.ascend.catalogue.expert_parallel_rules import A2_WORLDS
from porter.kernels.ascend.catalogue.mla import HIDDEN_SIZES, QUERY_RANKS
from porter.kernels.ascend.catalogue.quant_matmul import LONGEST
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, PAGES, POWERS_OF_TWO
from porter.models.auto_class import text_config
from porter.parallel_layout import Layout, experts_of, kv_heads_of, undividable
from porter.plan import head_dim_of
from porter.plan_memory import Load, Stored, chosen_of


@dataclass(frozen=True)
class Constraint:
    """One requirement with the layout's `numbers`. `met` is None where no document says what this chip takes, or no
    layout can meet it: the Op then runs as plain torch."""

    needs: str
    numbers: str
    met: bool | None
    source: str


@dataclass(frozen=True)
class Subject:
    """What constraints are asked of."""

    config: Any
    local: Any
    layout: Layout
    chip: Chip
    load: Load
    rows: tuple[Stored, ...]
    scheme: str


def constraints(subject: Subject) -> tuple[Constraint, ...]:
    """Every constraint that applies to the model, the scheme and the layout."""
    return tuple(found for ask in ASKED for found in ask(subject))


def _whole_parts(subject: Subject) -> Iterator[Constraint]:
    faults = undividable(subject.config, subject.layout)
    text, tp = text_config(subject.config), subject.layout.tp
    numbers = "; ".join(faults) or f"{text.num_attention_heads} heads / TP {tp} = {text.num_attention_heads // tp}"
    yield Constraint("heads, widths and experts divide into whole parts", numbers, not faults, "arithmetic")


def _kv_heads(subject: Subject) -> Iterator[Constraint]:
    text, tp, heads = text_config(subject.config), subject.layout.tp, kv_heads_of(subject.config)
    if getattr(text, "kv_lora_rank", None):
        numbers = f"one latent of {text.kv_lora_rank} + {text.qk_rope_head_dim}, whole on each of {tp} cards"
        yield Constraint("the cache of latents is replicated", numbers, True, "latent attention has one KV head")
        return
    if heads >= tp:
        numbers = f"{heads} KV heads / TP {tp} = {heads // tp} a card"
    else:
        numbers = f"{heads} KV heads < TP {tp}: each head on {tp // heads} cards"
    yield Constraint("KV heads divide, or are replicated", numbers, max(heads, tp) % min(heads, tp) == 0, "arithmetic")


def _attention_heads(subject: Subject) -> Iterator[Constraint]:
    text, mine = text_config(subject.config), text_config(subject.local)
    heads, page = mine.num_attention_heads, PAGES + "torch_npu-npu_fused_infer_attention_score.md"
    if getattr(text, "kv_lora_rank", None):
        numbers = f"{text.num_attention_heads} heads / TP {subject.layout.tp} = {heads} a card"
        yield Constraint(
            f"query heads over latents one of {', '.join(map(str, POWERS_OF_TWO))}",
            numbers,
            heads in POWERS_OF_TWO or _plain_torch(text),
            page,
        )
        sizes = f"latent {text.kv_lora_rank}, rope {text.qk_rope_head_dim}"
        met = (text.kv_lora_rank, text.qk_rope_head_dim) == (512, 64) or None
        yield Constraint("latent of 512 with rope of 64", sizes, met, page)
        return
    shared = heads // max(1, mine.num_key_value_heads)
    numbers = f"{heads} query heads / {mine.num_key_value_heads} KV heads = {shared}"
    met = heads % max(1, mine.num_key_value_heads) == 0 and shared <= 64
    yield Constraint("query heads a whole multiple, at most 64, of KV heads", numbers, met, page)
    dim = head_dim_of(text)
    yield Constraint("head size at most 512 and 16-byte aligned", f"{dim}", (dim <= 512 and dim % 8 == 0) or None, page)


def _plain_torch(text: Any) -> bool | None:
    """None where no layout brings the model to the operator: it runs as plain torch, whatever its heads."""
    return None if (text.kv_lora_rank, text.qk_rope_head_dim) != (512, 64) else False


def _prolog(subject: Subject) -> Iterator[Constraint]:
    text = text_config(subject.config)
    if not getattr(text, "kv_lora_rank", None):
        return
    numbers = f"hidden {text.hidden_size}, query rank {text.q_lora_rank}"
    fits = text.hidden_size in HIDDEN_SIZES and text.q_lora_rank in QUERY_RANKS
    numbers += "" if fits else ": its products are called one by one"
    needs = "npu_mla_prolog_v3: hidden size of its list, query rank 1536 or 2048 (where it is used)"
    yield Constraint(needs, numbers, True, PAGES + "torch_npu-npu_mla_prolog_v3.md")


def _indexer(subject: Subject) -> Iterator[Constraint]:
    text = text_config(subject.config)
    if not getattr(text, "index_topk", None) or not getattr(text, "kv_lora_rank", None):
        return
    page, top = PAGES + "torch_npu-npu_lightning_indexer.md", text.index_topk
    numbers = f"{text.index_n_heads} heads of {text.index_head_dim}, whole on each card"
    yield Constraint(
        "at most 64 indexer heads of 128",
        numbers,
        (text.index_n_heads <= 64 and text.index_head_dim == 128) or None,
        page,
    )
    met = 1 <= top <= 2048 or 3072 <= top <= 8192 or None
    yield Constraint("keys chosen 1..2048 or 3072..8192", f"{top}", met, page)


def _linear_attention(subject: Subject) -> Iterator[Constraint]:
    mine = text_config(subject.local)
    if not getattr(mine, "linear_num_value_heads", None):
        return
    page = PAGES + "torch_npu-npu_chunk_gated_delta_rule.md"
    key, value = mine.linear_key_head_dim, mine.linear_value_head_dim
    yield Constraint(
        "head sizes of linear attention at most 128", f"{key} and {value}", max(key, value) <= 128 or None, page
    )
    heads = f"{mine.linear_num_value_heads} value heads / {mine.linear_num_key_heads} key heads a card"
    met = mine.linear_num_value_heads % max(1, mine.linear_num_key_heads) == 0
    yield Constraint("value heads a whole multiple of key heads", heads, met, page)


def _last_dimensions(subject: Subject) -> Iterator[Constraint]:
    quantized = [r for r in subject.rows if r.form.bits < 16 and r.held.kind != "routed experts"]
    if quantized:
        size, name = max((r.held.local[-1], r.held.name) for r in quantized)
        rows, widest = max((r.held.local[0], r.held.name) for r in quantized)
        products = -(-rows // (LONGEST // 16 * 16))
        needs = f"last dimensions of quantized products at most {LONGEST}"
        numbers = f"inputs at most {size} ({name}); outputs at most {rows} ({widest}), in {products} products"
        yield Constraint(needs, numbers, size <= LONGEST, PAGES + "torch_npu-npu_quant_matmul.md")
    experts = [r for r in subject.rows if r.held.kind == "routed experts"]
    if experts:
        size, name = max((max(r.held.local[1:]), r.held.name) for r in experts)
        met, page = size <= LONGEST, PAGES + "torch_npu-npu_grouped_matmul.md"
        yield Constraint(f"inner axes of grouped products at most {LONGEST}", f"{size} ({name})", met, page)


def _blocked_layout(subject: Subject) -> Iterator[Constraint]:
    """FRACTAL_NZ needs K and N of a card's share in whole fractals: 16 elements, N 32 for eight bits and fewer."""
    for bits, wide, label in ((16, 16, "bfloat16"), (8, 32, "int8"), (4, 64, "int4")):
        rows = [r for r in subject.rows if r.form.bits == bits and len(r.held.local) in (2, 3) and _is_product(r)]
        odd = [r for r in rows if r.held.local[-1] % 16 or r.held.local[-2] % wide]
        if not rows:
            continue
        shapes = "; ".join(f"{r.held.name} {list(r.held.local)} stays ND" for r in odd)
        numbers = shapes or f"{len(rows)} kinds of weights, after the split"
        needs = f"{label} weights in FRACTAL_NZ: inputs a multiple of 16, outputs of {wide}"
        yield Constraint(needs, numbers, True, "fractals of 16 x 32 bytes; what is not aligned stays ND")


def _is_product(row: Stored) -> bool:
    return row.held.kind not in ("embedding", "norms") and "conv1d" not in row.held.name


def _int4(subject: Subject) -> Iterator[Constraint]:
    if any(r.form.name == "int4" for r in subject.rows):
        parts = subject.layout.expert_tp
        numbers = f"each expert over {parts} card{'s' * (parts > 1)} (TP {subject.layout.tp}, EP {subject.layout.ep})"
        source = "vllm-ascend quantization/methods/w4a8.py: scale_bias of down_proj has 16 slices"
        yield Constraint(
            "int4 experts: at most 16 cards share an expert, a power of two", numbers, 16 % parts == 0, source
        )


def _formats(subject: Subject) -> Iterator[Constraint]:
    for form in dict.fromkeys(r.called_for for r in subject.rows if r.called_for != r.form):
        needs = f"{form.name} products"
        numbers = f"{subject.chip.name} has {', '.join(subject.chip.dtypes)}; weights fall back to bfloat16"
        yield Constraint(needs, numbers, True, subject.chip.source)


def _dispatch(subject: Subject) -> Iterator[Constraint]:
    if subject.layout.ep == 1:
        return
    page = PAGES + "torch_npu-npu_moe_distribute_dispatch_v2.md"
    layout, text = subject.layout, text_config(subject.config)
    hidden, rows, chosen = text.hidden_size, -(-subject.load.batch // layout.cards), chosen_of(text)
    local = experts_of(subject.config) // layout.ep
    if subject.chip.name not in (A2, A3):
        yield Constraint("expert parallel dispatch documented for the chip", "the page lists 910B and 910C", None, page)
        return
    if subject.chip.name == A2:
        sizes, met = ", ".join(map(str, A2_WORLDS)), layout.ep in A2_WORLDS
        yield Constraint(f"EP one of {sizes} (fullmesh)", f"EP {layout.ep}", met, page)
        met = hidden <= 7168 and hidden % 32 == 0
        yield Constraint("hidden size at most 7168 and a multiple of 32 (fullmesh)", f"{hidden}", met, page)
    else:
        yield Constraint("EP 2..768", f"EP {layout.ep}", 2 <= layout.ep <= 768, page)
        yield Constraint("hidden size 1024..8192", f"{hidden}", 1024 <= hidden <= 8192, page)
    most = 256 if subject.chip.name == A2 else 512
    yield Constraint(
        f"tokens a card at most {most}", f"{subject.load.batch} / {layout.cards} cards = {rows}", rows <= most, page
    )
    yield Constraint("experts chosen at most 16", f"{chosen}", chosen <= 16, page)
    numbers = f"{experts_of(subject.config)} experts / EP {layout.ep} = {local} a card"
    met = experts_of(subject.config) <= 1024 and experts_of(subject.config) % layout.ep == 0
    yield Constraint("at most 1024 experts, as many on each card", numbers, met, page)


def _vocabulary(subject: Subject) -> Iterator[Constraint]:
    text, tp = text_config(subject.config), subject.layout.tp
    share = -(-text.vocab_size // tp)
    padding = share * tp - text.vocab_size
    numbers = f"{text.vocab_size} / TP {tp} = {share} rows" + (f", {padding} of them padding" if padding else "")
    yield Constraint("vocabulary divides, or is padded", numbers, True, "arithmetic")


ASKED: tuple[Callable[[Subject], Iterator[Constraint]], ...] = (
    _whole_parts,
    _kv_heads,
    _attention_heads,
    _prolog,
    _indexer,
    _linear_attention,
    _vocabulary,
    _last_dimensions,
    _blocked_layout,
    _int4,
    _formats,
    _dispatch,
)
