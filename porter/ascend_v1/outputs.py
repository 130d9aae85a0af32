"""How each tensor of an AscendV1 checkpoint is computed from tensors of the original one, a linear at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from porter.ascend_v1.activation import InputScale
from porter.ascend_v1.codes import (
    Rows,
    deq_bits,
    int4_codes,
    int8_codes,
    pack_rows,
    quant_bias,
    rows_of,
    scale_bias,
)
from porter.ascend_v1.original import Original, Stacked
from porter.ascend_v1.quant_type import FLOAT, TYPES, Linear
from porter.checkpoint.convert import Output
from porter.checkpoint.layout import TensorPlan
from porter.checkpoint.reader import Checkpoint
from porter.errors import PorterError
from porter.fp8_blocks import BlockWeight, Fp8Blocks

Compute = Callable[[list[Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class Conversion:
    """What every output is made by: the original's names, the linears' types, their input scales, and the dtype that
    the written model is loaded in. `narrow` float32 weights are stored in that dtype."""

    original: Original
    types: Mapping[str, str]
    scales: Mapping[str, InputScale]
    blocks: Fp8Blocks
    dtype: torch.dtype
    narrow: bool = False
    description: dict[str, str] = field(default_factory=dict)

    def outputs(self, checkpoint: Checkpoint) -> list[Output]:
        """One Output per linear, stack or other tensor of `checkpoint`, in its order; fills in `description`."""
        scales = set(self.blocks.scales.values())
        biases = {f"{name}.bias" for name, kind in self.types.items() if kind != FLOAT}
        result = []
        for name in checkpoint.names:
            if name in scales or name in biases:
                continue
            stack, linear = self.original.stacks.get(name), name.removesuffix(".weight")
            if stack is not None:
                result.append(self._of_stack(stack))
            elif name.endswith(".weight") and self.types.get(linear, FLOAT) != FLOAT:
                result.append(self._of_linear(self.original.linears[linear], checkpoint))
            else:
                result.append(self._of_float(name, checkpoint))
        return result

    def _of_float(self, name: str, checkpoint: Checkpoint) -> Output:
        dtype = checkpoint.info(name).torch_dtype
        if dtype is None or (dtype.is_floating_point and dtype.itemsize < 2 and name not in self.blocks.scales):
            raise PorterError(
                f"{checkpoint.directory}: tensor {name} is {checkpoint.info(name).dtype}, and nothing says what its "
                "codes mean; give the checkpoint in bf16, fp32 or FP8 blocks"
            )
        keeps = any(re.search(rf"\b{re.escape(k)}\b", name) for k in self.original.kept)
        if name in self.blocks.scales or (self.narrow and dtype == torch.float32 and not keeps):
            dtype = self.dtype
        plan = TensorPlan(name, dtype, checkpoint.info(name).shape)
        self.description[name] = FLOAT

        def compute(tensors: list[Tensor]) -> dict[str, Tensor]:
            (part,) = self.blocks.parts((name,), tensors)
            value = part.dense(plan.dtype) if isinstance(part, BlockWeight) else part.to(plan.dtype)
            if value.is_floating_point() and value.isinf().any() and not any(t.isinf().any() for t in tensors[:1]):
                raise PorterError(f"{name}: a value overflows {plan.dtype}; choose --dtype bf16")
            return {name: value}

        return Output((plan,), self.blocks.sources((name,)), compute)

    def _of_linear(self, linear: Linear, checkpoint: Checkpoint) -> Output:
        names = [f"{linear.name}.weight"] + ([f"{linear.name}.bias"] if linear.bias else [])
        plans = self._plans(linear)

        def compute(tensors: list[Tensor]) -> dict[str, Tensor]:
            weight, *bias = self.blocks.parts(names, tensors)
            rows = weight.rows if isinstance(weight, BlockWeight) else rows_of(weight)
            float_bias = bias[0] if bias else None
            assert float_bias is None or isinstance(float_bias, Tensor)
            return self._quantized(linear, rows, float_bias)

        return Output(plans, self.blocks.sources(names), compute)

    def _of_stack(self, stack: Stacked) -> Output:
        linears = [self.original.linears[name] for name in stack.parts]
        kept = [self.types[linear.name] == FLOAT for linear in linears]
        plans = tuple(plan for linear in linears for plan in self._plans(linear))

        def compute(tensors: list[Tensor]) -> dict[str, Tensor]:
            (whole,) = tensors
            result: dict[str, Tensor] = {}
            width = len(stack.rows)
            for i, linear in enumerate(linears):
                expert = whole[i // width].transpose(0, 1) if stack.transposed else whole[i // width]
                start = sum(stack.rows[: i % width])
                weight = expert[start : start + linear.rows]
                if kept[i]:
                    result[f"{linear.name}.weight"] = weight.to(self.dtype)
                else:
                    result |= self._quantized(linear, rows_of(weight), None)
            return result

        return Output(plans, (stack.source,), compute)

    def _plans(self, linear: Linear) -> tuple[TensorPlan, ...]:
        kind = self.types[linear.name]
        if kind == FLOAT:
            self.description[f"{linear.name}.weight"] = FLOAT
            return (TensorPlan(f"{linear.name}.weight", self.dtype, (linear.rows, linear.columns)),)
        plans = []
        for suffix, (dtype, shape) in TYPES[kind].specifications(linear, self.dtype).items():
            plans.append(TensorPlan(f"{linear.name}.{suffix}", dtype, shape))
            self.description[plans[-1].name] = kind
        if linear.bias:
            plans.append(TensorPlan(f"{linear.name}.bias", torch.float32, (linear.rows,)))
            self.description[plans[-1].name] = FLOAT
        return tuple(plans)

    def _quantized(self, linear: Linear, rows: Rows, bias: Tensor | None) -> dict[str, Tensor]:
        """Every tensor of a quantized linear under its full name."""
        kind, shape = TYPES[self.types[linear.name]], (linear.rows, linear.columns)
        if kind.packed:
            codes, scale = int4_codes(rows, shape)
            values = {"weight": pack_rows(codes), "scale_bias": scale_bias(codes, scale, linear.splits_inputs)}
        else:
            # Without a weight_scale of its own, the loader takes the float32 deq_scale as it is.
            codes, scale = int8_codes(rows, shape, self.dtype if "weight_scale" in kind.tensors else torch.float32)
            values = {"weight": codes}
        values |= {"weight_scale": scale, "weight_offset": torch.zeros_like(scale)}
        if kind.static:
            values |= self._static(codes, scale, self.scales[linear.name], bias)
        result = {f"{linear.name}.{suffix}": values[suffix] for suffix in ("weight", *kind.tensors)}
        return result if bias is None else result | {f"{linear.name}.bias": bias.to(torch.float32)}

    def _static(self, codes: Tensor, scale: Tensor, inputs: InputScale, bias: Tensor | None) -> dict[str, Tensor]:
        input_scale = torch.tensor([inputs.scale], dtype=torch.float32)
        deq = input_scale * scale[:, 0]
        return {
            "quant_bias": quant_bias(codes, deq, inputs.offset, bias),
            "input_scale": input_scale,
            "input_offset": torch.tensor([float(inputs.offset)]),
            "deq_scale": deq if self.dtype == torch.bfloat16 else deq_bits(deq),
        }


def plans_of(outputs: Sequence[Output]) -> list[TensorPlan]:
    """Every tensor that `outputs` write."""
    return [plan for output in outputs for plan in output.plans]


def counted(types: Mapping[str, str], linears: Mapping[str, Any]) -> dict[str, int]:
    """Type -> how many linears have it."""
    counts: dict[str, int] = {}
    for name in linears:
        kind = types.get(name, FLOAT)
        counts[kind] = counts.get(kind, 0) + 1
    return dict(sorted(counts.items()))
