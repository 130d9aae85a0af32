"""Which linears vllm-ascend loads as one, and so must be of one type.

Source: packed_modules_model_mapping of vllm_ascend/quantization/modelslim_config.py, by the model_type of config.json;
a type that is not in it keeps the mapping of vLLM's own class, which for Qwen2, Qwen3 and Llama is `DENSE`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

_QKV = ("qkv_proj", ("q_proj", "k_proj", "v_proj"))
_GATE_UP = ("gate_up_proj", ("gate_proj", "up_proj"))
_EXPERTS = ("experts", ("experts.0.gate_proj", "experts.0.up_proj", "experts.0.down_proj"))
_QKV_A = ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa"))
_NEXT = ("in_proj", ("in_proj_qkvz", "in_proj_ba"))
_LINEAR_ATTENTION = (("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")), ("in_proj_ba", ("in_proj_b", "in_proj_a")))

Fused = Mapping[str, tuple[str, ...]]

DENSE: Fused = MappingProxyType(dict((_QKV, _GATE_UP)))
_MOE: Fused = MappingProxyType(dict((_QKV, _GATE_UP, _EXPERTS)))
_DEEPSEEK: Fused = MappingProxyType(dict((_GATE_UP, _EXPERTS, _QKV_A)))

MAPPINGS: Mapping[str, Fused] = MappingProxyType(
    {
        **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe", "qwen3_omni_moe", "glm4_moe", "glm4v_moe", "step3p5"), _MOE),
        **dict.fromkeys(
            (
                "deepseek_v2",
                "deepseek_v3",
                "deepseek_v32",
                "kimi_k2",
                "pangu_ultra_moe",
                "glm_moe_dsa",
                "longcat_flash",
            ),
            _DEEPSEEK,
        ),
        "deepseek_v4": MappingProxyType(dict((_GATE_UP, _EXPERTS))),
        "qwen3_next": MappingProxyType(dict((_QKV, _GATE_UP, _NEXT, _EXPERTS))),
        "qwen3_5": MappingProxyType(dict((_QKV, _GATE_UP, *_LINEAR_ATTENTION))),
        "qwen3_5_moe": MappingProxyType(dict((_QKV, _GATE_UP, *_LINEAR_ATTENTION, _EXPERTS))),
    }
)


@dataclass(frozen=True)
class Group:
    """Linears that one layer of vLLM holds: `layer` is its name there, `members` are names on disk that exist."""

    layer: str
    members: tuple[str, ...]


def mapping_of(model_type: str) -> Fused:
    """Fused layer -> its parts, for the model_type of a config.json."""
    return MAPPINGS.get(model_type, MAPPINGS.get(model_type.removesuffix("_text"), DENSE))


def loads_quantized_experts(model_type: str) -> bool:
    """Whether routed experts of the type can be quantized at all: without "experts" in the mapping, vllm-ascend asks
    the description for "...mlp.experts.weight", which is a KeyError."""
    return "experts" in mapping_of(model_type)


def groups_of(linears: Iterable[str], model_type: str) -> list[Group]:
    """The fused groups among the names `linears` (without ".weight"), all experts of a layer being one."""
    found: dict[str, list[str]] = {}
    fused = mapping_of(model_type)
    layer_of = {part: layer for layer, parts in fused.items() if layer != "experts" for part in parts}
    for name in linears:
        owner, _, last = name.rpartition(".")
        if ".experts." in name:
            found.setdefault(name.partition(".experts.")[0] + ".experts", []).append(name)
        elif last in layer_of:
            found.setdefault(f"{owner}.{layer_of[last]}", []).append(name)
    return [Group(layer, tuple(members)) for layer, members in found.items()]


def parts_of(layer: str, model_type: str) -> tuple[str, ...]:
    """The names on disk that vllm-ascend looks up in the description for its layer `layer`."""
    owner, _, last = layer.rpartition(".")
    return tuple(f"{owner}.{part}" for part in mapping_of(model_type).get(last, (last,)))
