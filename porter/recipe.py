"""How each tensor of the ported checkpoint is computed from tensors of the original one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from porter.activation_range import Range
from porter.correspondence import Correspondence
from porter.errors import PorterError
from porter.kernels.reference.experts_w4a8 import make_scale_bias, pack_int4, pack_scale
from porter.kernels.reference.linear_static import offset_correction
from porter.quantization import INT4_MAX, quantize_per_channel

STATIC_TENSORS = ("input_scale", "input_offset", "quant_bias")
"""Beside the weight of a linear whose input has a static scale."""

Compute = Callable[[list[torch.Tensor]], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class TensorRecipe:
    """Outputs (name -> dtype, shape) computed together from the named source tensors.

    `compute` also takes one of `pieces` equal runs of the sources and gives those rows of the outputs: no row depends
    on another's sources, so a stack of experts is converted in the memory of one. With `by_rows` it also takes some
    rows of a piece's one source, and gives those of the outputs.
    """

    outputs: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    sources: tuple[str, ...]
    compute: Compute
    pieces: int = 1
    by_rows: bool = False


def recipes(
    ported: nn.Module,
    correspondence: Correspondence,
    layout: Correspondence,
    tied: dict[str, str],
    dtype: torch.dtype,
    beside: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ranges: Mapping[str, Range] = MappingProxyType({}),
) -> list[TensorRecipe]:
    """One recipe per tensor of `ported` (on the meta device) and those `beside` it, int8 weights with their scales.

    `ranges` are those of the inputs of linears with a static scale, by the linear's name; without them their recipes
    tell what will be written, and cannot compute it. `layout` maps upstream's parameters to those on disk; `tied` maps
    parameters that the checkpoint does not store to the ones that they equal.
    """
    state = {**ported.state_dict(), **beside}
    keep = tuple(getattr(ported, "_keep_in_fp32_modules_strict", None) or ())
    result = []
    for name, tensor in state.items():
        if _belongs_to_codes(name, state):
            continue
        sources = tuple(
            disk
            for upstream in correspondence.source_of(name)
            for disk in layout.source_of(tied.get(upstream, upstream))
        )
        pieces = _pieces(name, sources, layout)
        if tensor.dtype == torch.int8:
            result.append(_int8_recipe(name, state, sources, layout, pieces, ranges))
            continue
        wanted = torch.float32 if any(k in name for k in keep) else dtype
        # What is not in the default dtype on the meta device was put there by the scheme, or is no float.
        wanted = wanted if tensor.dtype == torch.get_default_dtype() else tensor.dtype
        join = _joiner(name, correspondence, layout)
        result.append(TensorRecipe({name: (wanted, tuple(tensor.shape))}, sources, _cast(name, wanted, join), pieces))
    return result


def _pieces(name: str, sources: tuple[str, ...], layout: Correspondence) -> int:
    """One piece per expert, or per source whose rows follow one another."""
    entry = next((e for e in layout.entries if e.target == name), None)
    return len(sources) // len(entry.sizes) if entry is not None and entry.kind == "experts" else len(sources)


def _joiner(
    name: str, correspondence: Correspondence, layout: Correspondence
) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    entry = next((e for e in layout.entries if e.target == name), None)
    if entry is not None:
        return entry.join
    if len(correspondence.source_of(name)) > 1:
        return lambda parts: torch.cat(parts, dim=0)
    return lambda parts: parts[0]


def _cast(name: str, dtype: torch.dtype, join: Callable[[list[torch.Tensor]], torch.Tensor]) -> Compute:
    def compute(parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        joined = join(parts).to(dtype)
        if dtype.is_floating_point and joined.isinf().any() and not any(p.isinf().any() for p in parts):
            raise PorterError(f"{name}: a value overflows {dtype}; choose --scheme fp32 or bf16")
        return {name: joined}

    return compute


def _belongs_to_codes(name: str, state: Mapping[str, torch.Tensor]) -> bool:
    """Whether the tensor is computed together with a quantized weight."""
    owner, _, leaf = name.rpartition(".")
    if leaf in STATIC_TENSORS:
        return f"{owner}.weight" in state
    return any(name.endswith(end) and name.removesuffix(end) in state for end in ("_scale", "_scale_bias"))


def _int8_recipe(
    name: str,
    state: Mapping[str, torch.Tensor],
    sources: tuple[str, ...],
    layout: Correspondence,
    pieces: int,
    ranges: Mapping[str, Range],
) -> TensorRecipe:
    entry = next((e for e in layout.entries if e.target == name), None)
    linear = name.removesuffix(".weight")
    beside = [f"{linear}.{leaf}" for leaf in STATIC_TENSORS]
    static = beside[0] in state
    int4 = f"{name}_scale_bias" in state
    quantize = _int4(state[f"{name}_scale"].shape[-2]) if int4 else _static(linear, ranges) if static else _int8

    def compute(parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        joined = entry.join(parts) if entry else torch.cat(parts, dim=0)
        return quantize(name, joined)

    names = [name, *(n for n in (f"{name}_scale", f"{name}_scale_bias") if n in state), *(beside if static else ())]
    outputs = {n: (state[n].dtype, tuple(state[n].shape)) for n in names}
    # One scale and offset of the input belong to all rows together.
    by_rows = entry is None and pieces == len(sources) and quantize is _int8
    return TensorRecipe(outputs, sources, compute, 1 if static else pieces, by_rows)


def _int8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    codes, scale = quantize_per_channel(weight)
    return {name: codes, f"{name}_scale": scale}


def _int4(groups: int) -> Callable[[str, torch.Tensor], dict[str, torch.Tensor]]:
    """One scale per output channel, repeated over the `groups` of inputs that the kernel reads."""

    def quantize(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scale = quantize_per_channel(weight, INT4_MAX)
        grouped = scale[..., None, :].expand(*scale.shape[:-1], groups, -1)
        bias = make_scale_bias(codes, grouped)
        return {name: pack_int4(codes), f"{name}_scale": pack_scale(grouped), f"{name}_scale_bias": bias}

    return quantize


def _static(linear: str, ranges: Mapping[str, Range]) -> Callable[[str, torch.Tensor], dict[str, torch.Tensor]]:
    def quantize(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if linear not in ranges:
            raise PorterError(f"{linear}: the range of its input was not measured; give --calibration FILE")
        scale, offset = ranges[linear].parameters()
        quantized = _int8(name, weight)
        correction = offset_correction(quantized[name], offset)
        return quantized | dict(
            zip((f"{linear}.{leaf}" for leaf in STATIC_TENSORS), (scale, offset, correction), strict=True)
        )

    return quantize


def consumed(recipe_list: Iterable[TensorRecipe]) -> set[str]:
    """Every source tensor that the recipes read."""
    return {source for recipe in recipe_list for source in recipe.sources}
