"""Which type each linear gets, by the scheme that the user names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from porter.ascend_v1.fused_groups import groups_of, loads_quantized_experts
from porter.ascend_v1.original import Original
from porter.ascend_v1.quant_type import FLOAT, PRIORITY, TYPES, check_shape, loadable
from porter.errors import PorterError

DEFAULT = "w8a8"
ALIASES: Mapping[str, str] = MappingProxyType({"int8": "w8a16", "w8a8_dynamic": "w8a8", "w4a8_dynamic": "w4a8"})


@dataclass(frozen=True)
class AscendScheme:
    """The type of linears of each role; see `Linear.role`."""

    name: str
    attention: str
    mlp: str
    expert: str
    description: str

    def type_of(self, role: str) -> str:
        """The type of linears of that role."""
        return {"attention": self.attention, "mlp": self.mlp, "expert": self.expert}[role]


SCHEMES: Mapping[str, AscendScheme] = MappingProxyType(
    {
        s.name: s
        for s in (
            AscendScheme("w8a8", *("W8A8_DYNAMIC",) * 3, "int8; activations one scale per token, at run time"),
            AscendScheme("w8a8_static", "W8A8", "W8A8", "W8A8_DYNAMIC", "int8; activations one calibrated scale"),
            AscendScheme("w4a8", "W8A8_DYNAMIC", "W8A8_DYNAMIC", "W4A8_DYNAMIC", "int4 routed experts, the rest w8a8"),
            AscendScheme("w8a16", "W8A16", "W8A16", "W8A16", "int8 weights, float activations; no routed experts"),
            AscendScheme("deepseek-w8a8", "W8A8", "W8A8_DYNAMIC", "W8A8_DYNAMIC", "MLA static, the rest dynamic"),
        )
    }
)


def scheme_of(name: str | None) -> AscendScheme:
    """The scheme of that name; w8a8 without one. Raises PorterError naming the choices."""
    wanted = name or DEFAULT
    scheme = SCHEMES.get(ALIASES.get(wanted, wanted))
    if scheme is None:
        raise PorterError(f"--scheme {wanted}: AscendV1 is written in one of {', '.join(SCHEMES)}")
    return scheme


def types_of(original: Original, scheme: AscendScheme) -> dict[str, str]:
    """Linear -> its type. Raises PorterError for what vllm-ascend cannot load, before any weight is read.

    Of in_proj_b and in_proj_a (Qwen3.5), which steer the decay of linear attention by some tens of rows, the type is
    FLOAT; Qwen3-Next's in_proj_ba shares a layer with in_proj_qkvz, and so its type.
    """
    found = {}
    for name, linear in original.linears.items():
        kept = name.endswith((".in_proj_b", ".in_proj_a"))
        found[name] = FLOAT if kept else scheme.type_of(linear.role)
    _check(original, scheme, found)
    return found


def _check(original: Original, scheme: AscendScheme, types: Mapping[str, str]) -> None:
    at = f"--scheme {scheme.name}"
    experts = [name for name, linear in original.linears.items() if linear.role == "expert"]
    if scheme.name == "w4a8" and not experts:
        raise PorterError(f"{at}: vllm-ascend loads W4A8_DYNAMIC for routed experts only, and the model has none")
    if scheme.name == "deepseek-w8a8" and not any(n.endswith(".kv_b_proj.weight") for n in original.expected):
        raise PorterError(f"{at}: is for models with multi-head latent attention; choose w8a8 or w8a8_static")
    if experts and not loads_quantized_experts(original.model_type):
        raise PorterError(
            f"{at}: vllm-ascend has no fused experts for model_type {original.model_type}, so quantized ones are a "
            "KeyError when it loads; no scheme of AscendV1 serves this model"
        )
    for name, kind in types.items():
        if kind == FLOAT:
            continue
        linear = original.linears[name]
        if not loadable(kind, linear.layer):
            raise PorterError(
                f"{at}: vllm-ascend has no {kind} for {linear.layer} layers ({name}); choose "
                f"{' or '.join(s.name for s in SCHEMES.values() if loadable(s.type_of(linear.role), linear.layer))}"
            )
        check_shape(linear, kind)
    for group in groups_of(types, original.model_type):
        kinds = {types[name] for name in group.members}
        if len(kinds) > 1:
            raise PorterError(f"{at}: {group.layer} would mix {', '.join(sorted(kinds))}; choose another scheme")


def model_quant_type(types: Mapping[str, str]) -> str:
    """The description's `model_quant_type`: see `PRIORITY`."""
    counts = Counter(kind for kind in types.values() if kind in PRIORITY)
    return max(counts, key=PRIORITY.index, default=FLOAT)


def static_linears(types: Mapping[str, str]) -> list[str]:
    """The linears whose inputs are quantized by a calibrated scale."""
    return [name for name, kind in types.items() if kind in TYPES and TYPES[kind].static]
