"""What a port will be before any weight is read: Ops with their providers and evidence, memory, and the roofline."""

from __future__ import annotations

import copy
import itertools
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from porter.chips.catalogue import Chip
from porter.compressed_keys import compressed_bytes_per_token, has_compressed_keys, window_bytes
from porter.kernels.dispatch import op_calls
from porter.kernels.registry import REFERENCE, default_registry
from porter.models.auto_class import text_config
from porter.models.family import Family
from porter.models.port import PortedSource
from porter.models.reduce import OTHER_NAMES

EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
EXPERTS_CHOSEN = ("num_experts_per_tok", *OTHER_NAMES["num_experts_per_tok"])
"""What configs call the routed experts of a layer, and those of them that one token passes."""

VISION_TOWERS = frozenset({"visual", "vision_tower", "vision_model"})
"""What models call the part that reads images."""


@dataclass(frozen=True)
class OpPlan:
    """One Op of the ported model on the target chip."""

    op: str
    variant: str
    provider: str
    evidence: str
    refused: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """`porter adapt --plan`: bytes are bytes, tokens_per_second is the memory-bound limit of a batch of one."""

    model_type: str
    chip: str
    scheme: str
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    state_bytes: int
    bytes_read_per_token: int
    chip_memory_bytes: int | None
    fits: bool | None
    tokens_per_second: float | None
    ops: tuple[OpPlan, ...]
    ported: tuple[dict[str, Any], ...]
    near_misses: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    special: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def is_scale(name: str) -> bool:
    """Whether a parameter belongs to how a scheme stores another one, and keeps its own dtype."""
    return name.rpartition(".")[2].endswith(("_scale", "_scale_bias", "_offset", "quant_bias"))


def parameter_count(model: nn.Module) -> int:
    """Weights of a ported model, int4 codes each, what schemes add left out."""
    parameters = dict(model.named_parameters())
    packed = {name.removesuffix("_scale_bias") for name in parameters if name.endswith("_scale_bias")}
    return sum(p.numel() * (2 if n in packed else 1) for n, p in parameters.items() if not is_scale(n))


def parameter_bytes(model: nn.Module, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of each parameter of a meta-device ported `model`: what its scheme does not store otherwise has `dtype`."""
    result = {}
    for name, parameter in model.named_parameters():
        by_scheme = parameter.dtype != torch.get_default_dtype() or is_scale(name)
        result[name] = parameter.numel() * (parameter.dtype if by_scheme else dtype).itemsize
    return result


def layer_kinds(config: Any) -> list[str]:
    """The kind of each layer of a text config: attention in full where it names none."""
    return getattr(config, "layer_types", None) or ["full_attention"] * int(config.num_hidden_layers)


def attending_layers(config: Any) -> int:
    """Layers of a text config that keep keys: those of linear attention keep a state."""
    return sum(kind != "linear_attention" for kind in layer_kinds(config))


def head_dim_of(config: Any) -> int:
    """The size of a head of a text config."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def kv_bytes_per_token(config: Any, width: int) -> int:
    """Bytes that one token adds to the cache over all layers: latents for MLA, else keys and values.

    Layers of linear attention keep a state of fixed size, so they add none. Lightning indexers add keys of their own.
    """
    config = text_config(config)
    if has_compressed_keys(config):
        return compressed_bytes_per_token(config, width)
    if getattr(config, "kv_lora_rank", None):
        per_layer = int(config.kv_lora_rank) + int(config.qk_rope_head_dim)
    else:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        per_layer = 2 * int(heads) * head_dim_of(config)
    attending = per_layer * attending_layers(config)
    return (attending + _indexer_keys(config, len(layer_kinds(config)))) * width


def _indexer_keys(config: Any, layers: int) -> int:
    """Values that one token adds to the caches of the indexers of sparse latent attention: not every layer has one."""
    if not getattr(config, "kv_lora_rank", None) or not getattr(config, "index_head_dim", None):
        return 0
    kinds: list[str] = getattr(config, "indexer_types", None) or ["full"] * layers
    return int(config.index_head_dim) * sum(kind == "full" for kind in kinds)


STATE_WIDTHS = ("num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel_size")


def state_bytes(model: nn.Module, width: int) -> int:
    """Bytes of the states of linear attention that one sequence keeps, whatever its length: float32 recurrent states,
    and the last inputs of each convolution at `width` bytes; windows beside compressed keys."""
    config = getattr(model, "config", None)
    total = window_bytes(config, width) if has_compressed_keys(config) else 0
    for module in model.modules():
        if isinstance(getattr(module, "conv1d", None), nn.Conv1d) and all(hasattr(module, a) for a in STATE_WIDTHS):
            heads, key_dim, value_dim, kernel = (int(getattr(module, a)) for a in STATE_WIDTHS)
            total += 4 * heads * key_dim * value_dim + width * kernel * int(module.conv1d.out_channels)  # type: ignore[union-attr, arg-type]
    return total


def experts_read(config: Any) -> tuple[int, int]:
    """(experts that a token is routed to, experts there are) of a layer; (1, 1) where the config names none.

    Where layers differ (Hunyuan lists a number for each), the largest share.
    """
    config = text_config(config)
    counts = next((c for n in EXPERT_COUNTS if (c := _counts(config, n))), [])
    chosen = next((c for n in EXPERTS_CHOSEN if (c := _counts(config, n))), [])
    if not counts or not chosen:
        return 1, 1
    return max(itertools.product(chosen, counts), key=lambda pair: pair[0] / pair[1])


def _counts(config: Any, name: str) -> list[int]:
    value = getattr(config, name, None)
    return [int(v) for v in (value if isinstance(value, list) else [value]) if v]


def bytes_read_per_token(config: Any, sizes: dict[str, int], tied: bool) -> int:
    """Weight bytes that decoding one token reads: the embedding row aside, of the routed experts only top_k, nothing of
    a vision tower, which runs once for a prompt."""
    total = 0
    top_k, experts = experts_read(config)
    for name, size in sizes.items():
        if not VISION_TOWERS.isdisjoint(name.split(".")):
            continue
        if name.endswith("embed_tokens.weight"):
            total += size if tied else 0
        elif ".experts." in name:
            total += size * top_k // experts
        else:
            total += size
    return total


def op_plans(model: nn.Module, chip: Chip, dtype: torch.dtype = torch.bfloat16) -> tuple[OpPlan, ...]:
    """For each distinct Op of `model`: the first provider with a kernel on `chip`, its evidence, and who refused.

    A provider whose vendor documents no call of the Op on `chip` in `dtype` has refused it, whatever kernel it holds.
    """
    registry = default_registry()
    plans = {}
    for _, call in op_calls(model):
        resolution = registry.resolve(call.name, call.variant, chip.name, chip.providers)
        provider, evidence, refused = REFERENCE, "reference", dict(resolution.refused)
        for name, implementation in resolution.implementations:
            reason = registry.undocumented(call.name, call.variant, chip.name, name, dtype)
            if reason is None:
                provider, evidence = name, implementation.evidence.rung
                break
            refused[name] = reason
        said = tuple(f"{name}: {reason}" for name, reason in refused.items())
        plans[call.name, call.variant] = OpPlan(call.name, call.variant, provider, evidence, said)
    return tuple(plans[key] for key in sorted(plans))


def plan_of(family: Family, source: PortedSource, config: Any, chip: Chip, scheme: str, dtype: torch.dtype) -> Plan:
    """The plan of a proven port; `config` says which of its modules are quantized."""
    with torch.device("meta"):
        model = source.model_class()(copy.deepcopy(config))
    sizes = parameter_bytes(model, dtype)
    read = bytes_read_per_token(config, sizes, bool(config.tie_word_embeddings))
    memory = chip.memory_bytes()
    bandwidth = chip.bandwidth_bytes_per_second()
    weight_bytes = sum(sizes.values())
    return Plan(
        model_type=family.model_type,
        chip=chip.name,
        scheme=scheme,
        parameters=parameter_count(model),
        weight_bytes=weight_bytes,
        kv_bytes_per_token=kv_bytes_per_token(config, dtype.itemsize),
        state_bytes=state_bytes(model, dtype.itemsize),
        bytes_read_per_token=read,
        chip_memory_bytes=memory,
        fits=None if memory is None else weight_bytes < memory,
        tokens_per_second=None if bandwidth is None else bandwidth / read,
        ops=op_plans(model, chip, dtype),
        ported=tuple(
            {"class": c.name, "rewrite": c.candidate.rewrite, "variant": c.candidate.variant, "proof_error": c.error}
            for c in source.classes
        ),
        near_misses=dict(source.near_misses),
        left=dict(source.left),
        special=family.special,
    )
