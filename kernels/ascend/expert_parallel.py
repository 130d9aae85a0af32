"""Routed experts over several ranks by torch_npu: tokens go to the ranks of their experts and come back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from porter.kernels.ascend.experts import COUNTS, product


class Ranks(NamedTuple):
    """The group of ranks that share the experts: its name, size, this rank, the experts of all of them, and how they
    talk: "fullmesh" on ascend-910b, "" on ascend-910c."""

    group: str
    size: int
    rank: int
    experts: int
    algorithm: str


def experts_standard_over_ranks(
    torch_npu: Any,
    ranks: Ranks,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """As experts/standard, where gate_up [E, 2I, H] and down [E, H, I] are the experts rank * E and on, top_k_index
    counts the experts of all ranks, and every rank calls with as many tokens of its own.

    The two operators of the vendor's belong together: what the first gives for the second is passed on unread.
    """
    weights, index = top_k_weights.float(), top_k_index.to(torch.int32)
    shared: dict[str, Any] = {
        "group_ep": ranks.group,
        "ep_world_size": ranks.size,
        "ep_rank_id": ranks.rank,
        "moe_expert_num": ranks.experts,
        "global_bs": 0,
        "comm_alg": ranks.algorithm,
    }
    sent_along = {"expert_scales": weights} if ranks.algorithm == "fullmesh" else {}
    rows, _, assist, counts, received, _, scales = torch_npu.npu_moe_distribute_dispatch_v2(
        x=hidden, expert_ids=index, quant_mode=0, expert_token_nums_type=COUNTS, **sent_along, **shared
    )
    wide = product(torch_npu, rows, gate_up.transpose(1, 2), counts, hidden.dtype)
    made = product(torch_npu, torch_npu.npu_swiglu(wide, dim=-1), down.transpose(1, 2), counts, hidden.dtype)
    result: torch.Tensor = torch_npu.npu_moe_distribute_combine_v2(
        expand_x=made,
        expert_ids=index,
        assist_info_for_combine=assist,
        ep_send_counts=received,
        expert_scales=weights,
        expand_scales=scales if sent_along else None,
        comm_quant_mode=0,
        **shared,
    )
    return result
