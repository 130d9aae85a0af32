"""Grouped products as the vendor documents them: float32 accumulation, integers exactly, one rounding to the result.

Rows that group_list leaves out are undefined: NaN, or 0x7f.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from porter.kernels.ascend.catalogue.grouped_matmul_rules import columns, sizes_of, sole
from porter.kernels.ascend.catalogue.quantization_dtypes import as_dtype
from porter.kernels.ascend.catalogue.vendor_op import Call
from porter.kernels.ascend.emulator.quantization import float_bits, per_token, to_int8
from porter.kernels.ascend.emulator.routing import poisoned


def _groups(call: Call, kind: int) -> Iterator[tuple[int, slice]]:
    """(expert, its rows of x), of those that have any."""
    start = 0
    for expert, rows in enumerate(sizes_of(call["group_list"], kind).tolist()):
        if rows:
            yield expert, slice(start, start + rows)
        start += rows


def _by_expert(
    call: Call, kind: int, outputs: int, dtype: torch.dtype, product: Callable[[int, slice], torch.Tensor]
) -> torch.Tensor:
    result = poisoned(sole(call, "x").shape[0], outputs, dtype=dtype)
    for expert, rows in _groups(call, kind):
        result[rows] = product(expert, rows).to(dtype)
    return result


def integer_product(codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """int8 codes [T, K] @ integers [K, N], exact, as float64: sums stay far below 2^53."""
    return codes.double() @ weight.double()


def unpacked(weight: torch.Tensor) -> torch.Tensor:
    """int32 [..., N / 8] -> int4 values [..., N] as int8, the first in the lowest four bits."""
    nibbles = (weight[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
    return torch.where(nibbles > 7, nibbles - 16, nibbles).flatten(-2).to(torch.int8)


def int4_product(codes: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """((codes - 8) @ (weight * scale) + bias): the two nibbles of each code apart, the low one less 8.

    codes [T, K], weight [K, N] of int4, scale [G, N] one for each of G groups of inputs, bias [N] -> float32 [T, N].
    """
    high = torch.div(codes.int(), 16, rounding_mode="floor")
    low = (codes.int() & 15) - 8
    total = bias.float().expand(len(codes), -1)
    step = len(weight) // len(scale)
    for group, factor in enumerate(scale):
        inputs = slice(group * step, (group + 1) * step)
        upper, lower = (integer_product(t[:, inputs], weight[inputs]).float() * factor for t in (high, low))
        total = total + upper * 16.0 + lower
    return total


def npu_grouped_matmul(call: Call) -> list[torch.Tensor]:
    """One tensor [rows, N]: rows of each expert times its weight, scaled as the dtypes call for."""
    x, weight = sole(call, "x"), sole(call, "weight")
    dtype = as_dtype(call["output_dtype"]) or x.dtype
    kinds = {torch.int32: _int4_rows, torch.int8: _int8_rows if x.dtype == torch.int8 else _antiquant_rows}
    rows = kinds.get(weight.dtype, _float_rows)
    return [_by_expert(call, call["group_list_type"], columns(weight), dtype, lambda e, r: rows(call, e, r, dtype))]


def _of(call: Call, name: str, expert: int) -> torch.Tensor | None:
    tensor = sole(call, name)
    return None if tensor is None else tensor[expert]


def _float_rows(call: Call, expert: int, rows: slice, dtype: torch.dtype) -> torch.Tensor:
    product: torch.Tensor = sole(call, "x")[rows].float() @ sole(call, "weight")[expert].float()
    bias = _of(call, "bias", expert)
    return product if bias is None else product + bias.float()


def _antiquant_rows(call: Call, expert: int, rows: slice, dtype: torch.dtype) -> torch.Tensor:
    """x @ ((weight + offset) * scale), the weight rounded to the dtype of x for the product."""
    x, offset, scale = sole(call, "x")[rows], _of(call, "antiquant_offset", expert), sole(call, "antiquant_scale")
    wide = sole(call, "weight")[expert].float() + (0.0 if offset is None else offset.float())
    product: torch.Tensor = x.float() @ (wide * scale[expert].float()).to(x.dtype).float()
    bias = _of(call, "bias", expert)
    return product if bias is None else product + bias.float()


def _int8_rows(call: Call, expert: int, rows: slice, dtype: torch.dtype) -> torch.Tensor:
    """(x @ weight + bias) * scale * per_token_scale; int8 results are rounded and held to [-128, 127]."""
    product = integer_product(sole(call, "x")[rows], sole(call, "weight")[expert])
    bias, scale = _of(call, "bias", expert), _of(call, "scale", expert)
    if bias is not None:
        product = product + bias.double()
    if scale is None:
        return product
    scaled = product.float() * (float_bits(scale) if scale.dtype == torch.int64 else scale.float())
    per_token = sole(call, "per_token_scale")
    if per_token is not None:
        scaled = scaled * per_token[rows, None]
    return to_int8(scaled) if dtype == torch.int8 else scaled


def _int4_rows(call: Call, expert: int, rows: slice, dtype: torch.dtype) -> torch.Tensor:
    names = ("weight", "scale", "bias")
    weight, scale, bias = (sole(call, name)[expert] for name in names)
    per_token: torch.Tensor = sole(call, "per_token_scale")[rows, None]
    return int4_product(sole(call, "x")[rows], unpacked(weight), float_bits(scale), bias) * per_token


def _gated_codes(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = wide.chunk(2, dim=-1)
    return per_token(gate / (1.0 + torch.exp(-gate)) * up)


def _swiglu_quant(call: Call, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight, scale = call["x"], sole(call, "weight"), sole(call, "weight_scale")
    codes = poisoned(len(x), columns(weight) // 2, dtype=torch.int8)
    scales = poisoned(len(x), dtype=torch.float32)
    for expert, rows in _groups(call, kind):
        if weight.dtype == torch.int32:
            factor = float_bits(scale[expert]).view(-1, columns(weight))
            assist = sole(call, "weight_assist_matrix")[expert]
            product = int4_product(x[rows], unpacked(weight[expert]), factor, assist)
        else:
            product = integer_product(x[rows], weight[expert]).float() * scale[expert].float()
        codes[rows], scales[rows] = _gated_codes(product * call["x_scale"][rows, None])
    return codes, scales


def npu_grouped_matmul_swiglu_quant(call: Call) -> tuple[torch.Tensor, ...]:
    """Codes and scales of silu(gate) * up of the products, by prefix sums; the third result is reserved."""
    return *_swiglu_quant(call, 0), poisoned(dtype=torch.float32)


def npu_grouped_matmul_swiglu_quant_v2(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """As the first version, for int8 or int4 weights, prefix sums or counts."""
    return _swiglu_quant(call, call["group_list_type"])


def npu_grouped_matmul_finalize_routing(call: Call) -> torch.Tensor:
    """float32 [output_bs, N]: each row times its logit added to output row row_index, and the shared expert's share."""
    x, weight = call["x"], call["w"]
    total = torch.zeros(call["output_bs"] or len(x), columns(weight))
    if call["shared_input"] is not None:
        start = call["shared_input_offset"]
        total[start : start + len(call["shared_input"])] += call["shared_input"].float() * call["shared_input_weight"]
    for expert, rows in _groups(call, call["group_list_type"]):
        if weight.dtype == torch.int32:
            scale, bias = float_bits(call["scale"][expert]), call["bias"][expert]
            product = int4_product(x[rows], unpacked(weight[expert]), scale, bias)
        else:
            product = integer_product(x[rows], weight[expert]).float() * call["scale"][expert]
        product = product * call["pertoken_scale"][rows, None] * call["logit"][rows, None]
        total.index_add_(0, call["row_index"][rows], product)
    return total


SEMANTICS = {
    "npu_grouped_matmul": npu_grouped_matmul,
    "npu_grouped_matmul_swiglu_quant": npu_grouped_matmul_swiglu_quant,
    "npu_grouped_matmul_swiglu_quant_v2": npu_grouped_matmul_swiglu_quant_v2,
    "npu_grouped_matmul_finalize_routing": npu_grouped_matmul_finalize_routing,
}
