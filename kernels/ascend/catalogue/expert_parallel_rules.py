"""What sending tokens to the ranks of their experts and back have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from porter.kernels.ascend.catalogue.rules import absent, dtypes, one_of, rank, that
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, Call, Rule

ASSIST = 128
"""int32 of bookkeeping for each row that a rank may receive."""
A2_WORLDS = (2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256)
"""Numbers of ranks that ascend-910b takes with comm_alg "fullmesh"."""
PER_SERVER = 8


def global_tokens(call: Call) -> int:
    """Tokens of all ranks, at most: global_bs, or those of this rank times the ranks."""
    return int(call["global_bs"] or call["expert_ids"].shape[0] * call["ep_world_size"])


def local_experts(call: Call) -> int:
    """Experts of each rank."""
    return int(call["moe_expert_num"] // call["ep_world_size"])


def most_rows(call: Call) -> int:
    """Rows that a rank may receive."""
    return global_tokens(call) * min(local_experts(call), int(call["expert_ids"].shape[1]))


def count_values(call: Call) -> int:
    """Values of ep_recv_counts: one for each expert and rank; on A2, more for what is reduced on the way."""
    values = call["ep_world_size"] * local_experts(call)
    if call.chip == A2:
        servers = call["ep_world_size"] // PER_SERVER
        values += 2 * global_tokens(call) * call["expert_ids"].shape[1] * servers
    return int(values)


def _fits_a2(hidden: int, tokens: int) -> bool:
    return 0 < hidden <= 7168 and hidden % 32 == 0 and tokens <= 256


def _fits_a3(hidden: int, tokens: int) -> bool:
    return 1024 <= hidden <= 8192 and tokens <= 512


def _hidden(name: str, algorithms: Sequence[str], says: str, holds: Any, chips: tuple[str, ...]) -> Rule:
    return that(
        f"{says} where comm_alg is {' or '.join(map(repr, algorithms))}",
        lambda call: call["comm_alg"] not in algorithms or holds(call[name].shape[1], call["expert_ids"].shape[0]),
        name,
        "expert_ids",
        "comm_alg",
        chips=chips,
    )


def _layout_rules(tokens: str) -> tuple[Rule, ...]:
    """How ranks talk, and what porter does not model."""
    return (
        one_of("comm_alg", "fullmesh", chips=(A2,)),
        one_of("comm_alg", "", "fullmesh_v1", chips=(A3,)),
        _hidden(tokens, ("fullmesh",), "H a multiple of 32 to 7168 and at most 256 tokens", _fits_a2, chips=(A2,)),
        _hidden(tokens, ("", "fullmesh_v1"), "H from 1024 to 8192 and at most 512 tokens", _fits_a3, chips=(A3,)),
        one_of("group_tp", ""),
        one_of("tp_world_size", 0, 1),
        one_of("tp_rank_id", 0),
        one_of("expert_shard_type", 0),
        one_of("shared_expert_num", 0, 1),
        one_of("shared_expert_rank_num", 0),
        one_of("zero_expert_num", 0),
        one_of("copy_expert_num", 0),
        one_of("const_expert_num", 0),
        absent("x_active_mask", "elastic_info", "performance_info"),
    )


RANKS = (
    that(
        "group_ep, the name of the group of ranks, of 1 to 127 letters",
        lambda c: 0 < len(c["group_ep"]) < 128,
        "group_ep",
    ),
    that(
        "ep_rank_id from 0 to below ep_world_size",
        lambda call: 0 <= call["ep_rank_id"] < call["ep_world_size"],
        "ep_rank_id",
        "ep_world_size",
    ),
    one_of("ep_world_size", *A2_WORLDS, chips=(A2,)),
    that("ep_world_size from 2 to 768", lambda c: 2 <= c["ep_world_size"] <= 768, "ep_world_size", chips=(A3,)),
    that(
        "moe_expert_num from 1 to 1024, a multiple of ep_world_size",
        lambda call: 1 <= call["moe_expert_num"] <= 1024 and call["moe_expert_num"] % call["ep_world_size"] == 0,
        "moe_expert_num",
        "ep_world_size",
    ),
)
"""Rules of the group of ranks."""


def shared_rules(tokens: str) -> tuple[Rule, ...]:
    """What both operators need; `tokens` is the argument of rows [rows, H]."""
    return (
        dtypes(tokens, "f16 bf16"),
        rank(tokens, 2),
        dtypes("expert_ids", "i32"),
        rank("expert_ids", 2),
        *RANKS,
        that(
            "expert_ids [tokens, k] with k from 1 to 16 and to moe_expert_num, and at least one token",
            lambda call: (
                0 < call["expert_ids"].shape[1] <= min(16, call["moe_expert_num"]) and call["expert_ids"].shape[0] > 0
            ),
            "expert_ids",
            "moe_expert_num",
        ),
        that(
            "global_bs 0, or as many tokens as each of ep_world_size ranks may have",
            lambda call: (
                call["global_bs"] % call["ep_world_size"] == 0
                and call["expert_ids"].shape[0] * call["ep_world_size"] <= global_tokens(call)
            ),
            "global_bs",
            "expert_ids",
            "ep_world_size",
        ),
        *_layout_rules(tokens),
    )


def _distinct(call: Call) -> bool:
    ordered = call["expert_ids"].sort(dim=-1)[0]
    within = int(ordered.min()) >= 0 and int(ordered.max()) < call["moe_expert_num"]
    return within and not bool((ordered[:, 1:] == ordered[:, :-1]).any())


EXPERT_IDS = that(
    "expert_ids from 0 to below moe_expert_num, none twice in a row", _distinct, "expert_ids", "moe_expert_num"
)
