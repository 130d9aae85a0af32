"""FRACTAL_NZ, the layout in which Ascend's matrix units read weights: which weights pay, and putting them into it.

A weight in FRACTAL_NZ keeps its shape and is read by matrix products alone; anything else takes its bytes for plain
ones and computes nonsense. So a weight is laid out only where an OpCall of its module is known to hand it to a product
that documents the layout: no convolution, norm, embedding or router, no projection whose weight attention reads
(kv_b_proj has no OpCall of its own), and no output projection that is tied to an embedding.

By default only quantized weights are: products of 16 bits gain little, and vllm-ascend leaves their weights plain as
well (its VLLM_ASCEND_ENABLE_NZ=1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from porter.kernels.ascend.catalogue.formats import unfit_for_blocks
from porter.kernels.ascend.catalogue.quant_matmul import LONGEST
from porter.kernels.ascend.catalogue.vendor_op import FRACTAL_NZ, VendorRefusal
from porter.kernels.dispatch import op_calls

EXPERTS = ("gate_up_proj", "down_proj")
READ_FROM_BLOCKS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("linear", "standard"): ("weight",),
    ("linear", "w8a8"): ("weight",),
    ("linear", "w8a8_static"): ("weight",),
    ("experts", "standard"): EXPERTS,
    ("experts", "w8a16"): EXPERTS,
    ("experts", "w8a8"): EXPERTS,
    ("experts", "w4a8"): EXPERTS,
    ("experts", "clamped"): EXPERTS,
    ("experts", "clamped_w8a16"): EXPERTS,
    ("experts", "clamped_w8a8"): EXPERTS,
}
"""The parameters that an Op's kernel hands to a product that documents FRACTAL_NZ. linear/w8a16 is not among them: its
npu_weight_quant_batchmatmul documents the layout for 4 bits alone."""
QUANTIZED = (torch.int8, torch.int32)
"""Dtypes of quantized weights; int32 holds eight values of 4 bits."""


def readers(model: torch.nn.Module) -> dict[str, list[tuple[str, str]]]:
    """The Ops (op, variant) of the module that holds each parameter of `model`, by the parameter's name."""
    ops: dict[str, list[tuple[str, str]]] = {}
    for site, call in op_calls(model):
        ops.setdefault(site.rpartition(".")[0], []).append((call.name, call.variant))
    return {name: ops.get(name.rpartition(".")[0], []) for name, _ in model.named_parameters(remove_duplicate=False)}


def matmul_weights(model: torch.nn.Module) -> list[str]:
    """The parameters of `model` that products may read from blocks, in its order; none that is tied to another use."""
    read = {
        name
        for name, ops in readers(model).items()
        if any(name.rpartition(".")[2] in READ_FROM_BLOCKS.get(op, ()) for op in ops)
    }
    everywhere = list(model.named_parameters(remove_duplicate=False))
    elsewhere = {id(parameter) for name, parameter in everywhere if name not in read}
    return [name for name, parameter in everywhere if name in read and id(parameter) not in elsewhere]


def worth_laying_out(model: torch.nn.Module) -> list[str]:
    """The quantized weights of `model` that may be in FRACTAL_NZ."""
    return [
        name
        for name in matmul_weights(model)
        if (weight := model.get_parameter(name)).dtype in QUANTIZED and _unfit_shape(weight) is None
    ]


def lay_out(torch_npu: Any, model: torch.nn.Module, names: Sequence[str] | None = None) -> tuple[str, ...]:
    """Cast the parameters `names` of `model`, by default those worth it, to FRACTAL_NZ in place; the names cast.

    Raises VendorRefusal naming the first that must stay plain, and why, before any is cast.
    """
    chosen = tuple(dict.fromkeys(worth_laying_out(model) if names is None else names))
    allowed = set(matmul_weights(model))
    for name in chosen:
        if (reason := _unfit(model, name, allowed)) is not None:
            raise VendorRefusal(f"{name}: {reason}; it must stay plain")
    for name in chosen:
        weight = model.get_parameter(name)
        weight.data = torch_npu.npu_format_cast(weight.data, FRACTAL_NZ)
    return chosen


def misplaced(torch_npu: Any, model: torch.nn.Module) -> list[str]:
    """A line "name: why" for each parameter of `model` that is in FRACTAL_NZ and must not be, whoever cast it."""
    allowed = set(matmul_weights(model))
    blocked = [n for n, p in model.named_parameters() if torch_npu.get_npu_format(p.data) == FRACTAL_NZ]
    return [f"{name}: {reason}" for name in blocked if (reason := _unfit(model, name, allowed)) is not None]


def _unfit(model: torch.nn.Module, name: str, allowed: set[str]) -> str | None:
    ops = readers(model).get(name)
    if ops is None:
        return "the model has no such parameter"
    weight = model.get_parameter(name)
    if name in allowed:
        return _unfit_shape(weight)
    if any(name.rpartition(".")[2] in READ_FROM_BLOCKS.get(op, ()) for op in ops):
        return "it is tied to a parameter that no matrix product reads"
    kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
    by = ", ".join("/".join(op) for op in ops) or "no Op"
    return f"it is a parameter of {kind}, which {by} reads, and not from FRACTAL_NZ"


def _unfit_shape(weight: torch.Tensor) -> str | None:
    shown = f"{str(weight.dtype).removeprefix('torch.')}{list(weight.shape)}"
    if weight.dtype == torch.float32:
        return f"{shown}: products of float32 read it as plain"
    if max(weight.shape[-2:]) > LONGEST:
        return f"{shown}: products take {LONGEST} rows at most, and a part of a matrix in FRACTAL_NZ is not read"
    reason = unfit_for_blocks(weight)
    return None if reason is None else f"{shown}: {reason}"
