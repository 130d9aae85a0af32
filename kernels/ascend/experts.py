"""Routed experts by torch_npu: sort the rows by expert, grouped products around the gated activation, add up.

Layout of the weights: as the Ops store them. npu_grouped_matmul reads weights [E, K, N] and takes transposed views, so
gate_up [E, 2I, H] and down [E, H, I] are passed as views, without a copy; int4 weights are stored as [E, K, N / 2]
(`porter.kernels.reference.experts_w4a8`), as transposed int4 is not taken.

Expert numbers outside [0, E) must be -1 or E: their rows sort behind the others, no product touches them, and
npu_moe_finalize_routing leaves them out, which it documents for drop_pad_mode 3 alone, on rows [rows, 1, H].
float32 router weights stay float32: npu_moe_finalize_routing takes them with bfloat16 rows, and float16 rows are
widened. What is narrower than the Op says: the scale of down in `experts_w8a8`, which npu_grouped_matmul takes in
bfloat16 for a bfloat16 result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from porter.kernels.ascend.catalogue.vendor_op import VendorRefusal
from porter.kernels.ascend.dry_run import Kernel

ROW_BY_ROW_WITH_NONE = 3
"""drop_pad_mode of npu_moe_finalize_routing: the index as npu_moe_init_routing_v2 writes it, -1 for none."""
COUNTS = 1
"""group_list_type of the grouped products, and expert_tokens_num_type of the sorting."""
SPLIT_CLAMPED = 2
"""swiglu_mode of npu_dequant_swiglu_quant: gate first, both halves clamped."""


class Sorted(NamedTuple):
    """Rows sorted by expert, where those of each token went (-1: nowhere), the rows of each expert, and the scales of
    quantized rows."""

    rows: torch.Tensor
    places: torch.Tensor
    counts: torch.Tensor
    scale: torch.Tensor


def sort_rows(torch_npu: Any, hidden: torch.Tensor, index: torch.Tensor, experts: int, quantize: bool) -> Sorted:
    """hidden [T, H] repeated for the experts of index [T, k] and sorted by them; int8 with scales if `quantize`."""
    return Sorted(
        *torch_npu.npu_moe_init_routing_v2(
            hidden,
            index.to(torch.int32),
            active_num=index.numel(),
            expert_num=experts + 1,
            drop_pad_mode=0,
            expert_tokens_num_type=COUNTS,
            expert_tokens_num_flag=True,
            quant_mode=1 if quantize else -1,
            active_expert_range=[0, experts],
            row_idx_type=0,
        )
    )


def product(
    torch_npu: Any, rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, dtype: torch.dtype, **others: Any
) -> torch.Tensor:
    """rows [rows, K] times weight [E, K, N] of their experts -> [rows, N] in `dtype`; the others in lists of one."""
    result: torch.Tensor = torch_npu.npu_grouped_matmul(
        [rows],
        [weight],
        group_list=counts,
        split_item=2,
        group_type=0,
        group_list_type=COUNTS,
        output_dtype=dtype,
        **{name: [tensor] for name, tensor in others.items()},
    )[0]
    return result


def add_up(torch_npu: Any, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum over k of weights [T, k] times the rows of each token -> [T, H] in the dtype of the rows."""
    mixed = (rows.dtype, weights.dtype) == (torch.bfloat16, torch.float32)
    wide = rows if mixed or rows.dtype == weights.dtype else rows.float()
    total: torch.Tensor = torch_npu.npu_moe_finalize_routing(
        wide.unsqueeze(1),
        None,
        None,
        None,
        weights if mixed else weights.to(wide.dtype),
        index,
        None,
        drop_pad_mode=ROW_BY_ROW_WITH_NONE,
    )
    return total.to(rows.dtype)


def _gated(torch_npu: Any, gate_up: torch.Tensor, limit: float | None) -> torch.Tensor:
    gated: torch.Tensor = (
        torch_npu.npu_swiglu(gate_up, dim=-1)
        if limit is None
        else torch_npu.npu_clipped_swiglu(gate_up, dim=-1, alpha=1.0, limit=limit, bias=0.0, interleaved=False)
    )
    return gated


def experts_standard(
    torch_npu: Any,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    limit: float | None = None,
) -> torch.Tensor:
    """Products rounded to the dtype of hidden after each; the gated activation is clamped where there is a limit."""
    _need_bfloat16(hidden, "gated activations, which the Op keeps in float32,")
    rows, index, counts, _ = sort_rows(torch_npu, hidden, top_k_index, gate_up.shape[0], quantize=False)
    wide = product(torch_npu, rows, gate_up.transpose(1, 2), counts, hidden.dtype)
    out = product(torch_npu, _gated(torch_npu, wide, limit), down.transpose(1, 2), counts, hidden.dtype)
    return add_up(torch_npu, out, index, top_k_weights)


def experts_w8a16(
    torch_npu: Any,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    limit: float | None = None,
) -> torch.Tensor:
    """Products of the int8 codes alone, which bfloat16 holds exactly, then each row times its expert's scales in
    float32: npu_grouped_matmul takes scales in bfloat16 only, and would round the scaled weights once more."""
    _need_bfloat16(hidden, "products of int8 codes")
    rows, index, counts, _ = sort_rows(torch_npu, hidden, top_k_index, gate_up.shape[0], quantize=False)
    expert = experts_of_rows(counts, rows.shape[0])

    def scaled(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        one = torch.ones(scale.shape, dtype=hidden.dtype, device=hidden.device)
        others = {"antiquant_scale": one, "antiquant_offset": torch.zeros_like(one)}
        codes = product(torch_npu, x, weight.transpose(1, 2), counts, hidden.dtype, **others)
        return codes.float() * scale.float()[expert]

    gated = _gated(torch_npu, scaled(rows, gate_up, gate_up_scale), limit).to(hidden.dtype)
    return add_up(torch_npu, scaled(gated, down, down_scale), index, top_k_weights.float()).to(hidden.dtype)


def experts_of_rows(counts: torch.Tensor, rows: int) -> torch.Tensor:
    """The expert of each sorted row, from the rows that each expert has; rows of none get the last expert."""
    numbers = torch.arange(rows, device=counts.device)
    return torch.searchsorted(counts.cumsum(dim=0), numbers, right=True).clamp_max(counts.shape[0] - 1)


def _need_bfloat16(hidden: torch.Tensor, what: str) -> None:
    if hidden.dtype == torch.float16:
        raise VendorRefusal(f"npu_grouped_matmul: needs hidden in bfloat16 or float32; {what} may overflow float16")


def experts_w8a8(
    torch_npu: Any,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    limit: float | None = None,
) -> torch.Tensor:
    """int8 products: the first as int32, scaled in float32 with the activation and quantized again in one operator; the
    second to the dtype of hidden, whose scale is bfloat16 for bfloat16 and float32 for float16."""
    rows, index, counts, scale = sort_rows(torch_npu, hidden, top_k_index, gate_up.shape[0], quantize=True)
    clamp: dict[str, Any] = {}
    if limit is not None:
        clamp = {"swiglu_mode": SPLIT_CLAMPED, "clamp_limit": limit, "glu_alpha": 1.0, "glu_bias": 0.0}
    codes, code_scale = torch_npu.npu_dequant_swiglu_quant(
        product(torch_npu, rows, gate_up.transpose(1, 2), counts, torch.int32),
        weight_scale=gate_up_scale.float(),
        activation_scale=scale.unsqueeze(1),
        group_index=counts,
        activate_left=True,
        quant_mode=1,
        **clamp,
    )
    down_scale = down_scale.to(torch.float32 if hidden.dtype == torch.float16 else torch.bfloat16)
    others = {"scale": down_scale, "per_token_scale": code_scale}
    out = product(torch_npu, codes, down.transpose(1, 2), counts, hidden.dtype, **others)
    return add_up(torch_npu, out, index, top_k_weights)


def experts_w4a8(
    torch_npu: Any,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    gate_up_scale_bias: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    down_scale_bias: torch.Tensor,
) -> torch.Tensor:
    """npu_grouped_matmul_swiglu_quant_v2 and npu_grouped_matmul on the stored bytes: nothing is repacked."""
    rows, index, counts, scale = sort_rows(torch_npu, hidden, top_k_index, gate_up.shape[0], quantize=True)
    by_group = gate_up_scale.shape[1] > 1
    codes, code_scale = torch_npu.npu_grouped_matmul_swiglu_quant_v2(
        rows,
        [_eight_by_eight(gate_up)],
        [gate_up_scale if by_group else gate_up_scale.squeeze(1)],
        scale,
        counts,
        weight_assist_matrix=[gate_up_scale_bias],
        dequant_mode=1 if by_group else 0,
        dequant_dtype=torch.float32,
        quant_mode=0,
        quant_dtype=torch.int8,
        group_list_type=COUNTS,
    )
    others = {"scale": down_scale, "per_token_scale": code_scale, "bias": down_scale_bias}
    out = product(torch_npu, codes, _eight_by_eight(down), counts, hidden.dtype, **others)
    return add_up(torch_npu, out, index, top_k_weights)


def _eight_by_eight(packed: torch.Tensor) -> torch.Tensor:
    """int8 [E, K, N / 2] of two int4 each, seen as int32 [E, K, N / 8] of eight."""
    if packed.shape[-1] % 4:
        raise VendorRefusal(f"npu_grouped_matmul: needs int4 outputs in eights; a weight has {2 * packed.shape[-1]}")
    return packed.view(torch.int32)


KERNELS: dict[tuple[str, str], Kernel] = {
    ("experts", "standard"): experts_standard,
    ("experts", "clamped"): experts_standard,
    ("experts", "w8a16"): experts_w8a16,
    ("experts", "clamped_w8a16"): experts_w8a16,
    ("experts", "w8a8"): experts_w8a8,
    ("experts", "clamped_w8a8"): experts_w8a8,
    ("experts", "w4a8"): experts_w4a8,
}
