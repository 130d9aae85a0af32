"""One card's share of a ported model: the model built at that card's widths, and what it lacks of the whole."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from porter.errors import PorterError
from porter.kernels.reference.experts_w4a8 import scale_groups
from porter.models.auto_class import text_config
from porter.plan import EXPERT_COUNTS

HEADS = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads")
WIDTHS = ("intermediate_size", "shared_expert_intermediate_size", "vocab_size")
"""Fields of a config that tensor parallelism divides: heads whole, the others to whole elements."""

KINDS: Mapping[str, str] = {
    r"embed_tokens": "embedding",
    r"^lm_head": "output head",
    r"\.experts\.": "routed experts",
    r"\.mlp\.gate\.": "router",
    r"\.shared_experts?": "shared experts",
    r"\.indexer\.": "indexer",
    r"\.linear_attn\.": "linear attention",
    r"norm": "norms",
    r"\.self_attn\.": "attention",
    r"\.mlp\.": "dense mlp",
}
"""What a parameter belongs to, by the first pattern that its name has."""


@dataclass(frozen=True)
class Layout:
    """`tp` cards share each attention layer and dense mlp; `ep` groups of cards hold different routed experts.

    There are max(tp, ep) cards. Where ep is the larger, `dp` = ep / tp groups of cards attend to different sequences;
    where tp is, each expert's inner width is divided by `expert_tp` = tp / ep.
    """

    tp: int
    ep: int

    @property
    def cards(self) -> int:
        """How many cards there are."""
        return max(self.tp, self.ep)

    @property
    def dp(self) -> int:
        """Groups that attend to different sequences."""
        return self.cards // self.tp

    @property
    def expert_tp(self) -> int:
        """Cards that share one expert."""
        return self.cards // self.ep


@dataclass(frozen=True)
class Held:
    """One kind of parameter: `layers` of this name, `*` for the layer's number; `whole` and `local` are one's shapes.

    `modules` is the name of the module that owns the first, as the scheme knows it.
    """

    name: str
    module: str
    kind: str
    layers: int
    whole: tuple[int, ...]
    local: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Elements on one card, over all layers."""
        return self.layers * torch.Size(self.local).numel()

    @property
    def split(self) -> str:
        """Which dimensions this card has less of: "dim 0: 24576 -> 1536", or "whole"."""
        parts = [f"dim {d}: {w} -> {n}" for d, (w, n) in enumerate(zip(self.whole, self.local, strict=True)) if w != n]
        return ", ".join(parts) or "whole"


def experts_of(config: Any) -> int:
    """Routed experts of a layer; 0 for a dense model, and for one whose layers are all left dense."""
    text = text_config(config)
    layers = int(text.num_hidden_layers)
    dense = {*range(getattr(text, "first_k_dense_replace", None) or 0), *(getattr(text, "mlp_only_layers", None) or ())}
    step = getattr(text, "decoder_sparse_step", None) or 1
    if all(layer in dense or (layer + 1) % step for layer in range(layers)):
        return 0
    return next((int(n) for field in EXPERT_COUNTS if isinstance(n := getattr(text, field, None), int)), 0)


def kv_heads_of(config: Any) -> int:
    """Key and value heads; with latent attention as many as heads, since each has its own share of kv_b_proj."""
    text = text_config(config)
    if getattr(text, "kv_lora_rank", None):
        return int(text.num_attention_heads)
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


def checked_layout(config: Any, tp: int, ep: int) -> Layout:
    """The layout. Raises PorterError for sizes that no cards can be arranged in."""
    if tp < 1 or ep < 1:
        raise PorterError(f"--tp {tp} --ep {ep}: each must be at least 1")
    if max(tp, ep) % min(tp, ep):
        raise PorterError(f"--tp {tp} --ep {ep}: the larger must be a multiple of the smaller")
    if ep > 1 and not experts_of(config):
        raise PorterError(f"--ep {ep}: {config.model_type} has no routed experts; leave it out")
    return Layout(tp, ep)


def undividable(config: Any, layout: Layout) -> list[str]:
    """What the layout cannot divide into whole parts, in words; empty where it divides everything."""
    text, said = text_config(config), []
    for field in HEADS:
        count = getattr(text, field, None)
        if isinstance(count, int) and count % layout.tp:
            said.append(f"{field} {count} / TP {layout.tp}")
    kv = kv_heads_of(config)
    if kv % layout.tp and layout.tp % kv:
        said.append(f"num_key_value_heads {kv} neither divides nor is divided by TP {layout.tp}")
    for field in WIDTHS[:-1]:
        width = getattr(text, field, None)
        if isinstance(width, int) and width % layout.tp:
            said.append(f"{field} {width} / TP {layout.tp}")
    if experts := experts_of(config):
        if experts % layout.ep:
            said.append(f"{experts} experts / EP {layout.ep}")
        parts = max(layout.expert_tp, layout.tp if getattr(text, "n_shared_experts", None) else 1)
        if text.moe_intermediate_size % parts:
            said.append(f"moe_intermediate_size {text.moe_intermediate_size} / {parts}")
    return said


def local_config(config: Any, layout: Layout) -> Any:
    """A config whose model has one card's heads, widths and vocabulary; routed experts are left to `local_model`."""
    whole = text_config(config)
    local = copy.deepcopy(config)
    text = text_config(local)
    if not getattr(whole, "kv_lora_rank", None) and getattr(whole, "head_dim", None) is None:
        text.head_dim = whole.hidden_size // whole.num_attention_heads
    for field in HEADS:
        if isinstance(count := getattr(whole, field, None), int):
            setattr(text, field, count // layout.tp)
    if getattr(whole, "num_key_value_heads", None):
        text.num_key_value_heads = max(1, kv_heads_of(config) // layout.tp)
    # Rows of the vocabulary are dealt out, and the padding token may be on another card.
    text.pad_token_id = local.pad_token_id = None
    for field in WIDTHS:
        if isinstance(width := getattr(whole, field, None), int):
            setattr(text, field, -(-width // layout.tp))
    if getattr(whole, "n_shared_experts", None):
        text.moe_intermediate_size = whole.moe_intermediate_size // layout.tp
    return local


def local_model(model_class: type[nn.Module], config: Any, layout: Layout) -> nn.Module:
    """One card's share of the ported model of `config`, on the meta device."""
    with torch.device("meta"):
        model = model_class(local_config(config, layout))
    width = getattr(text_config(config), "moe_intermediate_size", None)
    for module in model.modules():
        names = dict(module.named_parameters(recurse=False))
        if not {"gate_up_proj", "down_proj"} <= names.keys():
            continue
        experts, hidden = names["down_proj"].shape[0] // layout.ep, text_config(config).hidden_size
        inner = (width or names["down_proj"].shape[2]) // layout.expert_tp
        packed = "gate_up_proj_scale_bias" in names
        for name, shape in _expert_shapes(experts, hidden, inner, packed).items():
            if name in names:
                empty = torch.empty(shape, dtype=names[name].dtype, device="meta")
                setattr(module, name, nn.Parameter(empty, requires_grad=False))
    return model


def _expert_shapes(experts: int, hidden: int, inner: int, packed: bool) -> dict[str, tuple[int, ...]]:
    """The parameters of a stack of experts; packed are int4 codes, two outputs a byte (experts/w4a8)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, outputs, inputs in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        shapes[name] = (experts, inputs, outputs // 2) if packed else (experts, outputs, inputs)
        groups = scale_groups(inputs) if name == "down_proj" else 1
        shapes[f"{name}_scale"] = (experts, groups, outputs) if packed else (experts, outputs)
        shapes[f"{name}_scale_bias"] = (experts, outputs)
    return shapes


def held(whole: nn.Module, local: nn.Module) -> tuple[Held, ...]:
    """Every parameter of one card beside that of the whole model, layers of one name and shape together."""
    mine = dict(local.named_parameters())
    groups: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for name, parameter in whole.named_parameters():
        key = re.sub(r"\.\d+\.", ".*.", name), tuple(parameter.shape), tuple(mine[name].shape)
        groups.setdefault(key, []).append(name)
    return tuple(
        Held(pattern, _module(names[0]), kind_of(names[0]), len(names), shape, part)
        for (pattern, shape, part), names in groups.items()
    )


def kind_of(name: str) -> str:
    """Which kind of weights a parameter is of; "other" where no pattern knows it."""
    return next((kind for pattern, kind in KINDS.items() if re.search(pattern, name)), "other")


def _module(name: str) -> str:
    parent, _, leaf = name.rpartition(".")
    return parent if leaf in ("weight", "bias", "gate_up_proj", "down_proj") else name
