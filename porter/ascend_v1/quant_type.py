"""What a linear of each AscendV1 type stores, and for which layers vllm-ascend has a method.

Tensors: msmodelslim's AscendV1Saver.on_* (core/quant_service/modelslim_v1/save/ascendv1.py). Layers: the decorators
`register_scheme` in vllm_ascend/quantization/methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from porter.errors import PorterError

FLOAT = "FLOAT"
SLICES = 16
"""Columns of the scale_bias of a W4A8_DYNAMIC linear that is split over its inputs: one per rank of the widest tensor
parallel layout; vllm-ascend reads 16 / ranks of them."""

Layer = Literal["linear", "moe"]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Linear:
    """One linear of the original model: `name` as on disk, without ".weight"; weight [rows, columns].

    `module` is its name in the upstream class, where it is a module there; routed experts are none.
    `layer` is "moe" for one of routed experts. `role` is what a scheme goes by: the attention's, the MLP's (shared
    experts among them), or a routed expert's.
    """

    name: str
    rows: int
    columns: int
    role: Literal["attention", "mlp", "expert"]
    bias: bool = False
    module: str = ""

    @property
    def layer(self) -> Layer:
        """Which of vllm-ascend's methods loads it."""
        return "moe" if self.role == "expert" else "linear"

    @property
    def splits_inputs(self) -> bool:
        """Whether tensor parallelism cuts its columns: down_proj and o_proj, by msmodelslim's `process_scale`."""
        return self.name.endswith((".down_proj", ".o_proj", ".w2"))


@dataclass(frozen=True)
class QuantType:
    """A type of the description: `tensors` beside the weight, and the layers that vllm-ascend loads it for."""

    name: str
    layers: frozenset[Layer]
    tensors: tuple[str, ...]

    @property
    def static(self) -> bool:
        """Whether activations are quantized by a scale measured before."""
        return "input_scale" in self.tensors

    @property
    def packed(self) -> bool:
        """Whether a byte of the weight holds two rows."""
        return "scale_bias" in self.tensors

    def specifications(self, linear: Linear, model_dtype: torch.dtype) -> dict[str, tuple[torch.dtype, Shape]]:
        """Suffix -> (dtype, shape) of every tensor that `linear` stores; its bias, which stays float, not among them.

        deq_scale is float32 in a bfloat16 model; otherwise int64, whose low 32 bits are those of the float32.
        """
        rows, columns = linear.rows, linear.columns
        deq = torch.float32 if model_dtype == torch.bfloat16 else torch.int64
        slices = SLICES if linear.splits_inputs else 1
        known: dict[str, tuple[torch.dtype, Shape]] = {
            "weight": (torch.int8, (rows // 2 if self.packed else rows, columns)),
            "weight_scale": (torch.float32, (rows, 1)),
            "weight_offset": (torch.float32, (rows, 1)),
            "scale_bias": (torch.float32, (rows, slices)),
            "quant_bias": (torch.int32, (rows,)),
            "input_scale": (torch.float32, (1,)),
            "input_offset": (torch.float32, (1,)),
            "deq_scale": (deq, (rows,)),
        }
        return {suffix: known[suffix] for suffix in ("weight", *self.tensors)}


_BOTH: frozenset[Layer] = frozenset({"linear", "moe"})
_LINEAR: frozenset[Layer] = frozenset({"linear"})
_MOE: frozenset[Layer] = frozenset({"moe"})
_STATIC = ("quant_bias", "input_scale", "input_offset", "deq_scale")
_SCALES = ("weight_scale", "weight_offset")

TYPES: Mapping[str, QuantType] = MappingProxyType(
    {
        each.name: each
        for each in (
            QuantType("W8A8", _LINEAR, _STATIC),
            QuantType("W8A8_DYNAMIC", _BOTH, _SCALES),
            QuantType("W8A8_MIX", _LINEAR, _STATIC + _SCALES),
            QuantType("W8A16", _LINEAR, _SCALES),
            QuantType("W4A8_DYNAMIC", _MOE, (*_SCALES, "scale_bias")),
        )
    }
)
"""The types that porter knows in full."""

OTHER_TYPES: Mapping[str, frozenset[Layer]] = MappingProxyType(
    {
        "W4A16": _MOE,
        "W4A16_MXFP4": _MOE,
        "W4A4_DYNAMIC": _LINEAR,
        "W4A4_FLATQUANT_DYNAMIC": _LINEAR,
        "W4A4_MXFP4": _BOTH,
        "W4A4_MXFP4_FLATQUANT": _LINEAR,
        "W4A8_MXFP": _BOTH,
        "W8A8_MXFP8": _BOTH,
        "W8A8FP8_DYNAMIC": _BOTH,
        "W8A8S": _LINEAR,
        "W8A8SC": _LINEAR,
    }
)
"""Types that vllm-ascend has a method for and whose tensors porter does not check."""

PRIORITY = ("FLOAT", "W8A16", "W8A8_DYNAMIC", "W8A8_MIX", "W8A8")
"""model_quant_type is the last of these that occurs; W4A8_DYNAMIC is none of them (the saver's QUANT_TYPE_PRIORITY)."""


def loadable(name: str, layer: Layer) -> bool:
    """Whether vllm-ascend has a method of that type for that kind of layer."""
    known = TYPES[name].layers if name in TYPES else OTHER_TYPES.get(name, frozenset())
    return layer in known


def check_shape(linear: Linear, type_name: str) -> None:
    """PorterError for a linear whose sizes do not fit the packing of W4A8_DYNAMIC."""
    if not TYPES[type_name].packed:
        return
    columns = SLICES if linear.splits_inputs else 1
    if linear.rows % 8 or linear.columns % columns:
        raise PorterError(
            f"{linear.name}: [{linear.rows}, {linear.columns}] does not fit {type_name}, which needs rows in eights "
            f"and columns in {columns} equal slices; choose --scheme w8a8"
        )
