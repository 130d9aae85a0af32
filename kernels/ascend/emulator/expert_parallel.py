"""Expert parallelism as the vendor documents it, over torch.distributed's group of the name group_ep: one process for
each rank.

assist_info_for_combine holds (mark, rank, token, choice) of each row; on a chip its contents are nobody's business.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as distributed
from torch._C._distributed_c10d import _resolve_process_group

from porter.kernels.ascend.catalogue.expert_parallel_rules import (
    ASSIST,
    count_values,
    local_experts,
    most_rows,
)
from porter.kernels.ascend.catalogue.vendor_op import Call, VendorRefusal
from porter.kernels.ascend.emulator.routing import poisoned

MARK = 0x70726F
"""In the first value of each row's assist_info_for_combine, so that others' are known."""
AGREED = ("ep_world_size", "moe_expert_num", "global_bs", "comm_alg")
"""Arguments that must be the same on all ranks."""


def _group(call: Call) -> Any:
    """The group of ranks. Raises VendorRefusal where there is none of that name, or it is another's size or rank."""
    if not distributed.is_initialized():
        raise VendorRefusal(f"{call.op.name}: needs torch.distributed to be initialized, one process for each rank")
    try:
        group = _resolve_process_group(call["group_ep"])
    except (RuntimeError, ValueError) as error:
        raise VendorRefusal(f"{call.op.name}: needs a group of ranks named {call['group_ep']!r}") from error
    size, rank = distributed.get_world_size(group), distributed.get_rank(group)
    if (size, rank) != (call["ep_world_size"], call["ep_rank_id"]):
        raise VendorRefusal(
            f"{call.op.name}: needs ep_world_size and ep_rank_id of the group, {size} and {rank}; "
            f"they are {call['ep_world_size']} and {call['ep_rank_id']}"
        )
    return group


def _exchanged(call: Call, own: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """What each rank gives, in order of the ranks, of those that agree on the arguments."""
    gathered: list[Any] = [None] * call["ep_world_size"]
    distributed.all_gather_object(gathered, (tuple(call[name] for name in AGREED), own), group=_group(call))
    if any(arguments != gathered[0][0] for arguments, _ in gathered):
        raise VendorRefusal(f"{call.op.name}: needs {', '.join(AGREED)} to be the same on all ranks")
    return [given for _, given in gathered]


def _codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 x * (127 / largest magnitude of the row), and the reciprocal of that factor."""
    wide = x.float()
    largest = wide.abs().amax(dim=-1)
    factor = 127.0 / torch.where(largest == 0, 1.0, largest)
    return torch.round(wide * factor[:, None]).to(torch.int8), torch.where(largest == 0, 0.0, 1.0 / factor)


def npu_moe_distribute_dispatch_v2(call: Call) -> tuple[torch.Tensor, ...]:
    """The rows that came for this rank's experts, sorted by expert, then rank, then token; their scales; what
    npu_moe_distribute_combine_v2 needs; how many rows each expert has."""
    sent = call["x"] if call["quant_mode"] == 0 else None
    codes, scale = (sent, None) if sent is not None else _codes(call["x"])
    everyone = _exchanged(call, (codes, scale, call["expert_ids"], call["expert_scales"]))
    experts, first = local_experts(call), local_experts(call) * call["ep_rank_id"]
    x = poisoned(most_rows(call), call["x"].shape[1], dtype=codes.dtype)
    scales, weights = (poisoned(most_rows(call), dtype=torch.float32) for _ in range(2))
    assist = poisoned(max(call["expert_ids"].numel(), most_rows(call) * ASSIST), dtype=torch.int32)
    came = torch.zeros(experts, call["ep_world_size"], dtype=torch.int64)
    row = 0
    for expert in range(experts):
        for rank, (codes, scale, ids, given) in enumerate(everyone):
            for token, choice in (ids == first + expert).nonzero().tolist():
                x[row] = codes[token]
                if scale is not None:
                    scales[row] = scale[token]
                if given is not None:
                    weights[row] = given[token, choice]
                assist[row * ASSIST : row * ASSIST + 4] = torch.tensor([MARK, rank, token, choice])
                came[expert, rank] += 1
                row += 1
    counts = came.sum(dim=1)
    received = poisoned(count_values(call), dtype=torch.int32)
    received[: came.numel()] = came.flatten().cumsum(dim=0)
    return (
        x,
        scales,
        assist,
        counts if call["expert_token_nums_type"] == 1 else counts.cumsum(dim=0),
        received,
        poisoned(call["tp_world_size"], dtype=torch.int32),
        weights if call["expert_scales"] is not None else weights[:0],
    )


def npu_moe_distribute_combine_v2(call: Call) -> torch.Tensor:
    """Sum over k of expert_scales * what the experts made of each token of this rank, in float32, rounded once."""
    assist = call["assist_info_for_combine"][: most_rows(call) * ASSIST].view(-1, ASSIST)
    rows = int((assist[:, 0] == MARK).sum())
    last = local_experts(call) * call["ep_world_size"] - 1
    if rows != int(call["ep_send_counts"][last]):
        raise VendorRefusal(
            f"{call.op.name}: needs assist_info_for_combine and ep_send_counts as one call of "
            "npu_moe_distribute_dispatch_v2 gave them"
        )
    origin = assist[:rows, 1:4].long()
    total = torch.zeros(call["expert_ids"].shape[0], call["expand_x"].shape[1])
    for made, whence in _exchanged(call, (call["expand_x"][:rows], origin)):
        own = whence[:, 0] == call["ep_rank_id"]
        token, choice = whence[own, 1], whence[own, 2]
        total.index_add_(0, token, made[own].float() * call["expert_scales"][token, choice, None])
    return total.to(call["expand_x"].dtype)


SEMANTICS = {
    "npu_moe_distribute_dispatch_v2": npu_moe_distribute_dispatch_v2,
    "npu_moe_distribute_combine_v2": npu_moe_distribute_combine_v2,
}
