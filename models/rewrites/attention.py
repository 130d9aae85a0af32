"""q(x), k(x), v(x), rope, softmax(q k) v -> qkv(x), rope, attention, with or without q and k norms."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch import nn

from porter.models.rewrite import Adopted, Candidate, Fusion, Mismatch, attribute_named
from porter.models.rewrites import attention_forward as forwards
from porter.models.rewrites.signature import adopted

PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("q_proj", "k_proj", "v_proj", "dense"),
    ("wq", "wk", "wv", "wo"),
    ("query", "key", "value", "output"),
    ("query", "key", "value", "dense"),
    ("to_q", "to_k", "to_v", "to_out"),
    ("q", "k", "v", "o"),
)
HEAD_DIM = ("head_dim", "head_size", "d_head", "dim_head", "dim_per_head")
HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head", "heads")
LAYER = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx")
SCALING = ("scaling", "scale", "softmax_scale", "attn_scale", "softmax_scaling")
INVERSE_ROOT = "self.attention_scaling = self.{head_dim}**-0.5"


class GroupedQueryAttention:
    """Causal attention over grouped heads with rotary positions; sliding window where the layer has one.

    Which projection is which is told by their names, else by their order; the proof decides. Names that tell wrong are
    tried the other way round where the sizes allow it.
    """

    name = "attention"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """Candidates for every way to rotate and to normalise; None when the module has no such four projections."""
        children = {n: m for n, m in module.named_children() if m is not None}
        linears = {n: m for n, m in children.items() if isinstance(m, nn.Linear)}
        known = next((names for names in PROJECTIONS if set(names) <= linears.keys()), None)
        orders = list(_orders(linears, known))
        if not orders:
            if known is None or _gated(linears, known):
                return None
            return Mismatch(f"the sizes of {', '.join(known)} are not those of an attention")
        if known is None and attribute_named(module, (*HEAD_DIM, *HEADS), int) is None:
            return None
        norms = _norms(children)
        plain = (nn.Dropout, nn.Identity)
        extra = {n for n, m in children.items() if n not in (*orders[0], *norms) and not isinstance(m, plain)}
        if extra or len(norms) not in (0, 2):
            odd = ", ".join(sorted(extra or norms))
            return Mismatch(f"grouped-query attention with unknown parts: {odd}")
        signature = adopted(module)
        if isinstance(signature, Mismatch):
            return signature
        attributes = _attributes(module, orders[0], signature)
        if isinstance(attributes, Mismatch):
            return attributes
        return list(_candidates(module, orders, norms, signature, attributes))


def _orders(linears: dict[str, nn.Linear], known: tuple[str, ...] | None) -> Iterator[tuple[str, str, str, str]]:
    """Query, key, value and output, most likely first."""
    names = known or tuple(linears)
    if len(names) != 4 or (known is None and len(linears) != 4):
        return
    q, k, v, o = names
    for order in ((q, k, v, o), (k, q, v, o)):
        query, key, value, output = (linears[name] for name in order)
        grouped = query.out_features % key.out_features == 0 and key.out_features == value.out_features
        same = query.in_features == key.in_features == value.in_features
        if grouped and same and output.in_features == query.out_features:
            yield order


def _gated(linears: dict[str, nn.Linear], names: tuple[str, ...]) -> bool:
    """Whether the query is given together with an output gate, of which `gated_attention` speaks."""
    query, _, _, output = (linears[name] for name in names)
    return query.out_features == 2 * output.in_features


def _norms(children: dict[str, nn.Module]) -> dict[str, int]:
    """The children with one 1-D parameter, and its size: those whose name begins with q first."""
    found = {}
    for name, child in children.items():
        parameters = list(child.parameters())
        if len(parameters) == 1 and parameters[0].dim() == 1 and not any(child.children()):
            found[name] = parameters[0].numel()
    return dict(sorted(found.items(), key=lambda item: not item[0].startswith("q")))


def _attributes(module: nn.Module, order: tuple[str, ...], signature: Adopted | None) -> dict[str, str] | Mismatch:
    """What the ported forward reads -> the attribute of `module` that holds it."""
    layer = attribute_named(module, LAYER, int)
    caches = signature is None or "cache = None" not in signature.prologue
    if layer is None and caches:
        return Mismatch("q, k, v and o projections, but no attribute layer_idx")
    head_dim, heads = attribute_named(module, HEAD_DIM, int), attribute_named(module, HEADS, int)
    if head_dim is None and heads is None:
        return Mismatch("q, k, v and o projections, but no attribute head_dim")
    named = {"layer_idx": layer, "head_dim": head_dim, "o_proj": order[3]}
    return {ours: theirs for ours, theirs in named.items() if theirs is not None and ours != theirs}


def _candidates(
    module: nn.Module,
    orders: list[tuple[str, str, str, str]],
    norms: dict[str, int],
    signature: Adopted | None,
    attributes: dict[str, str],
) -> Iterator[Candidate]:
    heads = attribute_named(module, HEADS, int)
    head_dim = attribute_named(module, HEAD_DIM, int)
    first = [] if head_dim else [f"self.head_dim = self.qkv_sizes[0] // self.{heads}"]
    # Some layers of a model may have the attribute and others not (Qwen2-MoE).
    first.append('self.sliding_window = getattr(self, "sliding_window", None)')
    width = int(module.get_submodule(orders[0][0]).out_features)  # type: ignore[arg-type]
    variants = forwards.VARIANTS[_norm_width(norms, width)]
    for order, (scaling, line), (style, variant, forward) in itertools.product(
        orders, _scalings(module, head_dim or "head_dim"), variants
    ):
        swapped = "" if order == orders[0] or len(orders) == 1 else f", {order[0]} is the query"
        yield Candidate(
            rewrite=GroupedQueryAttention.name,
            forward=forward,
            variant=f"{variant}{swapped}",
            rename={
                **attributes,
                **dict(zip(("q_norm", "k_norm"), norms, strict=False)),
                **({} if scaling == "scaling" else {"scaling": scaling}),
            },
            fusions=(Fusion("qkv_proj", order[:3], sizes="qkv_sizes"),),
            append=(
                *first,
                *line,
                f'self.rope = OpCall("rope", "{style}")',
                'self.attention = OpCall("attention", "gqa")',
            ),
            adopt=signature,
        )


def _norm_width(norms: dict[str, int], width: int) -> str:
    if not norms:
        return "none"
    return "wide" if next(iter(norms.values())) == width else "per head"


def _scalings(module: nn.Module, head_dim: str) -> list[tuple[str, tuple[str, ...]]]:
    """(attribute that holds the factor of the scores, lines that set it): its own, else 1 / sqrt(head_dim)."""
    own = attribute_named(module, SCALING, float)
    if own == "scaling":
        return [(own, ())]
    computed = ("attention_scaling", (INVERSE_ROOT.format(head_dim=head_dim),))
    return [computed] if own is None else [(own, ()), computed]
