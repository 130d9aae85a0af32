"""Sorting tokens by expert and adding up, as the vendor documents it; what it leaves undefined is NaN or 0x7f."""

from __future__ import annotations

import torch

from porter.kernels.ascend.catalogue.grouped_matmul_rules import UNDEFINED_BYTE
from porter.kernels.ascend.catalogue.routing import active_range
from porter.kernels.ascend.catalogue.vendor_op import Call
from porter.kernels.ascend.emulator.quantization import per_token


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of undefined values: NaN, or integers whose every byte is 0x7f."""
    if dtype.is_floating_point:
        return torch.full(shape, torch.nan, dtype=dtype)
    return torch.full((*shape, dtype.itemsize), UNDEFINED_BYTE, dtype=torch.uint8).view(dtype).squeeze(-1)


def npu_moe_init_routing_v2(call: Call) -> tuple[torch.Tensor, ...]:
    """Rows of x sorted by expert; where each went (row_idx_type 0) or came from (1); rows of each expert; scales."""
    x, experts, (first, last) = call["x"], call["expert_idx"].flatten().long(), active_range(call)
    active = (experts >= first) & (experts < last)
    valid = int(active.sum())
    order = torch.argsort(torch.where(active, experts, last), stable=True)[:valid]
    rows = x[order // call["expert_idx"].shape[1]]
    expanded = poisoned(len(experts), x.shape[1], dtype=x.dtype if call["quant_mode"] == -1 else torch.int8)
    scales = poisoned(len(experts), dtype=torch.float32)
    if call["quant_mode"] == 1:
        rows, scales[:valid] = per_token(rows.float())
    expanded[:valid] = rows
    if call["row_idx_type"] == 0:
        index = torch.full((len(experts),), -1, dtype=torch.int32)
        index[order] = torch.arange(valid, dtype=torch.int32)
    else:
        index = poisoned(len(experts), dtype=torch.int32)
        index[:valid] = order.int()
    counts = torch.bincount(experts[active] - first, minlength=last - first)
    return expanded, index, counts if call["expert_tokens_num_type"] == 1 else counts.cumsum(dim=0), scales


def npu_moe_init_routing(call: Call) -> tuple[torch.Tensor, ...]:
    """Rows of x sorted by expert; where row i of column-by-column numbering went; the sorted experts."""
    x, experts = call["x"], call["expert_idx"].flatten()
    ordered, order = torch.sort(experts, stable=True)
    source = call["row_idx"].flatten()[order].long()
    index = torch.empty(len(experts), dtype=torch.int32)
    index[source] = torch.arange(len(experts), dtype=torch.int32)
    kept = min(call["active_num"], len(x)) * call["expert_idx"].shape[1]
    return x[source[:kept] % len(x)], index, ordered


def npu_moe_finalize_routing(call: Call) -> torch.Tensor:
    """Sum over k of scales * rows, in float32, in the dtype of the rows; an index of -1 adds nothing."""
    rows = call["expanded_permuted_rows"].flatten(0, -2).float()
    index, scales = call["expanded_src_to_dst_row"].long(), call["scales"]
    choices = 1 if scales is None else scales.shape[1]
    index = index.view(choices, -1).T if call["drop_pad_mode"] in (0, 1) else index.view(-1, choices)
    picked: torch.Tensor = rows[index.clamp_min(0)].masked_fill((index < 0)[..., None], 0.0)
    if scales is not None:
        picked = picked * scales.float()[..., None]
    return picked.sum(dim=1).to(call["expanded_permuted_rows"].dtype)


def npu_moe_token_permute(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of tokens sorted by index, and where each of a token's rows went."""
    order = torch.argsort(call["indices"].flatten(), stable=True)
    wanted = call["num_out_tokens"] or len(order)
    return call["tokens"][order // call["indices"].shape[1]][:wanted], torch.argsort(order).int()


def npu_moe_token_unpermute(call: Call) -> torch.Tensor:
    """Sum over k of probs * rows, in float32, in the dtype of the rows."""
    rows, probs = call["permuted_tokens"], call["probs"]
    picked: torch.Tensor = rows.float()[call["sorted_indices"].long()]
    if probs is not None:
        picked = (picked.unflatten(0, probs.shape) * probs.float()[..., None]).sum(dim=1)
    return picked.to(rows.dtype)


SEMANTICS = {
    "npu_moe_init_routing_v2": npu_moe_init_routing_v2,
    "npu_moe_init_routing": npu_moe_init_routing,
    "npu_moe_finalize_routing": npu_moe_finalize_routing,
    "npu_moe_token_permute": npu_moe_token_permute,
    "npu_moe_token_unpermute": npu_moe_token_unpermute,
}
