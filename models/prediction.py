"""Multi-token prediction layers (DeepSeek-V3, arXiv 2412.19437, section 2.2), which transformers' classes leave out.

A layer is given the model's last hidden state of a token, after the final norm, and the embedding of the next token,
and predicts the token after that: h' = block(eh_proj [enorm(embedding); hnorm(hidden)]), logits = head(shared_head.norm
(h')). The block is one of the family's decoder layers; embedding and head are the model's own. Equation 21 writes the
hidden state first; released weights have the embedding first, as DeepSeek's own and vLLM's deepseek_mtp code.

Ported layers are named as DeepSeek-V3's checkpoints name them: model.layers.N with N from num_hidden_layers on.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from porter.correspondence import Correspondence, Entry
from porter.models.checkpoint_layout import checkpoint_layout
from porter.models.field_rules import PREDICTION_LAYERS
from porter.models.port import PortedSource, source_on_meta
from porter.models.schemes import apply_schemes
from porter.models.search import correspondence_of

PARTS = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
"""What a layer has beside its decoder layer."""


@dataclass(frozen=True)
class PredictionNames:
    """How a family's checkpoints name the prediction layers; `{layer}` counts from num_hidden_layers, `{index}` from 0.

    `block` begins the decoder layer's names, `parts` are the names of PARTS in that order, `copies` tensors that repeat
    one of the model's (name on disk, and the model's parameter); `unsaid` layers belong to a config without a count.
    """

    block: str
    parts: tuple[str, str, str, str]
    copies: tuple[tuple[str, str], ...]
    unsaid: int = 0


DEEPSEEK = PredictionNames(
    block="model.layers.{layer}.",
    parts=tuple(f"model.layers.{{layer}}.{part}" for part in PARTS),  # type: ignore[arg-type]
    copies=(
        ("model.layers.{layer}.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.{layer}.shared_head.head.weight", "lm_head.weight"),
    ),
)
QWEN = PredictionNames(
    block="mtp.layers.{index}.",
    parts=(
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.fc.weight",
        "mtp.norm.weight",
    ),
    copies=(),
    unsaid=1,
)
"""Released Qwen3-Next checkpoints hold one layer, of which their config.json says nothing; vLLM's qwen3_next_mtp takes
one where `num_nextn_predict_layers` is not given, too."""


def prediction_layers(config: Any, unsaid: int = 0) -> int:
    """How many prediction layers a checkpoint of `config` has; `unsaid` where the config has no count."""
    given = [count for name in PREDICTION_LAYERS if (count := getattr(config, name, None)) is not None]
    return max(map(int, given)) if given else unsaid


def extended_config(config: Any, layers: int, like: Any = None) -> Any:
    """`config` of a model whose last `layers` decoder layers are the blocks of its prediction layers.

    Lists with an entry for each layer (`layer_types`, `mlp_layer_types`) are continued by their last entry, that of
    `like` where it is given: released models end with the kind of layer that their prediction layers have. These attend
    to all they have seen even where a model ends with a recurrent state.
    """
    extended, count = copy.deepcopy(config), int(config.num_hidden_layers)
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == count and name.endswith("_types"):
            last = getattr(like or config, name)[-1]
            setattr(extended, name, [*value, *["full_attention" if last == "linear_attention" else last] * layers])
    extended.num_hidden_layers = count + layers
    return extended


@dataclass(frozen=True)
class Prediction:
    """The prediction layers of one ported model, and how their tensors come from a checkpoint.

    `expected` are the names and shapes on disk, `copies` those that repeat a parameter of the model.
    """

    layers: tuple[int, ...]
    correspondence: Correspondence
    layout: Correspondence
    expected: Mapping[str, tuple[int, ...]]
    copies: Mapping[str, str]

    def stored(self, names: Collection[str]) -> bool:
        """Whether any tensor of the layers is among the names of a checkpoint."""
        return not self.expected.keys().isdisjoint(names)


def prediction_of(
    config: Any, module: str, class_name: str, source: PortedSource, names: PredictionNames, stored: Collection[str]
) -> Prediction:
    """The layers that `config` calls for; `stored` are the names in the checkpoint at hand, if there is one."""
    count, first = prediction_layers(config, names.unsaid), int(config.num_hidden_layers)
    upstream = source_on_meta(extended_config(config, count), module, class_name)
    disk = {layer: disk_names(names, layer, layer - first) for layer in range(first, first + count)}
    prefixes = tuple(f"model.layers.{layer}." for layer in disk)
    state = {n: t for n, t in upstream.state_dict().items() if n.startswith(prefixes)}
    hidden = int(config.hidden_size)
    for prefix in prefixes:
        for part in PARTS:
            shape = (hidden, 2 * hidden) if part == "eh_proj.weight" else (hidden,)
            state[prefix + part] = torch.empty(shape, device="meta")
    ported = correspondence_of(upstream, {c.name: c.candidate for c in source.classes})
    canonical = {_renamed(name, disk): name for name in stored}
    entries = {e.target: e for e in checkpoint_layout(upstream, canonical.keys()).entries if e.target in state}
    for name, tensor in state.items():
        entry = entries.get(name) or Entry(name, (name,), (int(tensor.shape[0]),), "rows")
        sources = tuple(_on_disk(s, disk) for s in entry.sources)
        if sources != (name,):
            entries[name] = Entry(name, sources, entry.sizes, entry.kind)
    expected: dict[str, tuple[int, ...]] = {}
    for name, tensor in state.items():
        shape, entry_or_none = tuple(tensor.shape), entries.get(name)
        for i, source_name in enumerate(entry_or_none.sources if entry_or_none else (name,)):
            expected[source_name] = entry_or_none.source_shape(i, shape) if entry_or_none else shape
    return Prediction(
        layers=tuple(disk),
        correspondence=Correspondence(tuple(e for e in ported.entries if e.target.startswith(prefixes))),
        layout=Correspondence(tuple(entries.values())),
        expected=expected,
        copies={k.format(layer=n, index=n - first): of for k, of in names.copies for n in disk},
    )


def disk_names(names: PredictionNames, layer: int, index: int) -> dict[str, str]:
    """Ported name -> name on disk of the parts, and of the beginning of the decoder layer's names (listed last)."""
    prefix = f"model.layers.{layer}."
    ours = (*(prefix + part for part in PARTS), prefix)
    theirs = (name.format(layer=layer, index=index) for name in (*names.parts, names.block))
    return dict(zip(ours, theirs, strict=True))


def _on_disk(name: str, disk: Mapping[int, Mapping[str, str]]) -> str:
    """The name on disk of a tensor in upstream's names, experts one by one; upstream may have another word for the
    model before its layers."""
    for here, there in (pair for names in disk.values() for pair in names.items()):
        _, found, rest = name.partition(here.removeprefix("model"))
        if found:
            return there + rest
    raise KeyError(name)


def _renamed(name: str, disk: Mapping[int, Mapping[str, str]]) -> str:
    """The other way; names of the model's own tensors stay."""
    pairs = ((here, there) for d in disk.values() for here, there in d.items())
    return next((here + name[len(there) :] for here, there in pairs if name.startswith(there)), name)


def layer_text(decoder_class: str, norm_class: str) -> str:
    """The class of a prediction layer, for the end of a generated modelling file."""
    return f'''

class PredictionLayer({decoder_class}):
    """A multi-token prediction layer (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    `embedded` [B, S, H] are tokens, `hidden_states` [B, S, H] the model's normalised output for the token before each;
    the result [B, S, H], given to the model's head, predicts the token after each.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.enorm = {norm_class}(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = {norm_class}(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = nn.ModuleDict({{"norm": {norm_class}(config.hidden_size, eps=config.rms_norm_eps)}})

    def forward(self, embedded: torch.Tensor, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        joined = torch.cat((self.enorm(embedded), self.hnorm(hidden_states)), dim=-1)
        return self.shared_head["norm"](super().forward(self.eh_proj(joined), **kwargs))
'''


def build_layer(module: Any, config: Any, index: int) -> nn.Module:
    """Layer `index` (0 the first) of generated `module`, its decoder layer numbered on after the model's.

    `config.porter["prediction_layers"]` are the numbers of all, `config.porter["prediction_quantized"]` is module name
    within the layer -> int8 scheme.
    """
    section = config.porter
    extended = extended_config(config, len(section["prediction_layers"]))
    layer: nn.Module = module.PredictionLayer(extended, int(config.num_hidden_layers) + index)
    apply_schemes(layer, SimpleNamespace(porter={"quantized": section.get("prediction_quantized", {})}))
    return layer
