"""How each tensor of the ported checkpoint is computed from tensors of the original one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from porter.correspondence import Correspondence
from porter.errors import PorterError
from porter.quantization import quantize_per_channel

Compute = Callable[[list[torch.Tensor]], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class TensorRecipe:
    """Outputs (name -> dtype, shape) computed together from the named source tensors.

    `compute` also takes one of `pieces` equal runs of the sources and gives those rows of the outputs: no row depends
    on another's sources, so a stack of experts is converted in the memory of one. With `by_rows` it also takes some rows
    of a piece's one source, and gives those of the outputs.
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
) -> list[TensorRecipe]:
    """One recipe per tensor of `ported` (on the meta device) and those `beside` it, int8 weights with their scales.

    `layout` maps upstream's parameters to those on disk; `tied` maps parameters that the checkpoint does not store to
    the ones that they equal.
    """
    state = {**ported.state_dict(), **beside}
    keep = tuple(getattr(ported, "_keep_in_fp32_modules_strict", None) or ())
    result = []
    for name, tensor in state.items():
        if name.endswith("_scale") and name.removesuffix("_scale") in state:
            continue
        sources = tuple(
            disk
            for upstream in correspondence.source_of(name)
            for disk in layout.source_of(tied.get(upstream, upstream))
        )
        pieces = _pieces(name, sources, layout)
        if tensor.dtype == torch.int8:
            result.append(_int8_recipe(name, tensor, sources, layout, pieces))
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


def _int8_recipe(
    name: str, tensor: torch.Tensor, sources: tuple[str, ...], layout: Correspondence, pieces: int
) -> TensorRecipe:
    entry = next((e for e in layout.entries if e.target == name), None)
    scale_name = f"{name}_scale"

    def compute(parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        joined = entry.join(parts) if entry else torch.cat(parts, dim=0)
        weight, scale = quantize_per_channel(joined)
        return {name: weight, scale_name: scale}

    shape = tuple(tensor.shape)
    outputs = {name: (torch.int8, shape), scale_name: (torch.float32, shape[:-1])}
    by_rows = entry is None and pieces == len(sources)
    return TensorRecipe(outputs, sources, compute, pieces, by_rows)


def consumed(recipe_list: Iterable[TensorRecipe]) -> set[str]:
    """Every source tensor that the recipes read."""
    return {source for recipe in recipe_list for source in recipe.sources}
