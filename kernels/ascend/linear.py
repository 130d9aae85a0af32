"""Matrix products by torch_npu: of floats by the vendor's own aten product, of int8 weights by its quantized ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from porter.kernels.ascend.catalogue.quant_matmul import LONGEST
from porter.kernels.ascend.catalogue.vendor_op import VendorRefusal
from porter.kernels.ascend.dry_run import Kernel
from porter.kernels.ascend.vendor import TORCH_ALONE

SHIFT = 128.0
"""The weight-only product takes codes / 128: a power of two, so exact, and its sums are of the size of the output."""


def linear_standard(torch_npu: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """torch's own product, which torch_npu implements for tensors on an NPU; operands of one dtype alone."""
    if x.dtype == torch.float64 or any(t is not None and t.dtype != x.dtype for t in (weight, bias)):
        raise VendorRefusal("linear: needs x, weight and bias of one dtype other than float64")
    return torch.nn.functional.linear(x, weight, bias)


def linear_grouped(torch_npu: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., G, K] with rows of the weight [G R, K] of its own for each group: torch's batched product."""
    if x.dtype == torch.float64 or weight.dtype != x.dtype:
        raise VendorRefusal("bmm: needs x and weight of one dtype other than float64")
    groups = x.shape[-2]
    stacked = weight.unflatten(0, (groups, -1))
    rows = x.flatten(0, -3) if x.dim() > 2 else x.unsqueeze(0)
    product = torch.bmm(rows.transpose(0, 1), stacked.transpose(1, 2)).transpose(0, 1)
    return product.reshape(*x.shape[:-1], stacked.shape[1])


def linear_w8a16(
    torch_npu: Any, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """npu_weight_quant_batchmatmul over the codes alone, then the scales in float32.

    The operator takes scales in the dtype of x: bfloat16 keeps 8 of their 24 bits, and the scaled weights are rounded
    once more. Codes are exact in bfloat16, so scaling the product costs one rounding of it and nothing else.
    """
    if x.dtype != torch.bfloat16:
        raise VendorRefusal(
            f"npu_weight_quant_batchmatmul: needs x in bfloat16 here; products of int8 codes may overflow {x.dtype}"
        )
    rows = x.reshape(-1, x.shape[-1])
    power = torch.full((1,), 1.0 / SHIFT, dtype=x.dtype, device=x.device)
    parts = [
        torch_npu.npu_weight_quant_batchmatmul(
            rows, block.t(), power, antiquant_offset=None, bias=None, antiquant_group_size=0, inner_precise=0
        )
        for block in _blocks(weight)
    ]
    product = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).float() * (weight_scale.float() * SHIFT)
    product = product if bias is None else product + bias.float()
    return product.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def linear_w8a8(
    torch_npu: Any, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """npu_dynamic_quant of each row, then npu_quant_matmul with both scales in float32."""
    codes, scale = torch_npu.npu_dynamic_quant(
        x.reshape(-1, x.shape[-1]), smooth_scales=None, group_index=None, dst_type=torch.int8
    )
    added = None if bias is None else bias.float()
    return _product(torch_npu, x, codes, weight, weight_scale, scale, added)


def linear_w8a8_static(
    torch_npu: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor,
    input_offset: torch.Tensor,
    quant_bias: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """npu_quantize with the measured scale and offset, then npu_quant_matmul.

    Without a bias the correction of the offset goes in as the int32 bias. With one both go in as one float32 bias, as
    the operator takes one alone. The activations' scale goes in per row: a float16 output would otherwise take scales
    cut to 19 bits.
    """
    columns = x.shape[-1]
    codes = torch_npu.npu_quantize(
        x.reshape(-1, columns),
        input_scale.expand(columns),
        input_offset.expand(columns),
        torch.qint8,
        axis=-1,
        div_mode=True,
    )
    added = quant_bias
    if bias is not None:
        added = quant_bias.float() * (weight_scale * input_scale) + bias.float()
    scale = input_scale.expand(codes.shape[0]).contiguous()
    return _product(torch_npu, x, codes, weight, weight_scale, scale, added)


def _product(
    torch_npu: Any,
    x: torch.Tensor,
    codes: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """codes [M, K] @ weight [N, K]^T in the dtype and with the leading dimensions of x; x2 is the weight's own memory,
    seen transposed."""
    start, parts = 0, []
    for block in _blocks(weight):
        rows = slice(start, start + block.shape[0])
        parts.append(
            torch_npu.npu_quant_matmul(
                codes,
                block.t(),
                weight_scale[rows],
                offset=None,
                pertoken_scale=scale,
                bias=None if bias is None else bias[rows],
                output_dtype=x.dtype,
            )
        )
        start = rows.stop
    product = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return product.reshape(*x.shape[:-1], weight.shape[0])


def _blocks(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """The rows of the weight in runs that the vendor's products take: vocabularies are longer."""
    yield from weight.split(LONGEST // 16 * 16) if weight.shape[0] > LONGEST else (weight,)


KERNELS: dict[tuple[str, str], Kernel] = {
    ("linear", "standard"): linear_standard,
    ("linear", "grouped"): linear_grouped,
    ("linear", "w8a16"): linear_w8a16,
    ("linear", "w8a8"): linear_w8a8,
    ("linear", "w8a8_static"): linear_w8a8_static,
}

EVIDENCE = dict.fromkeys((("linear", "standard"), ("linear", "grouped")), TORCH_ALONE)
"""Of the kernels that make no call of torch_npu."""
