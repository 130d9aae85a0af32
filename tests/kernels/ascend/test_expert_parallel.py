"""npu_moe_distribute_dispatch_v2 and combine_v2 over two processes, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from torch import multiprocessing

from porter.kernels.ascend.catalogue.table import catalogue
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, VendorRefusal
from porter.kernels.ascend.emulator.stand_in import emulated_npu
from porter.kernels.ascend.expert_parallel import Ranks, experts_standard_over_ranks
from porter.kernels.reference.experts import experts_standard

RANKS, EXPERTS, TOKENS, TOP_K, INTERMEDIATE = 2, 4, 5, 2, 32
CHIPS = {A2: ("fullmesh", 64), A3: ("", 1024)}
NAMES = ("expand_x", "dynamic_scales", "assist", "counts", "received", "tp", "scales")


def drawn(hidden_size: int) -> tuple[Any, ...]:
    """(gate_up, down, and for each rank its hidden, index, weights), the same in every process."""
    draw = torch.Generator().manual_seed(0)
    gate_up = torch.randn(EXPERTS, 2 * INTERMEDIATE, hidden_size, generator=draw).bfloat16() * hidden_size**-0.5
    down = torch.randn(EXPERTS, hidden_size, INTERMEDIATE, generator=draw).bfloat16() * INTERMEDIATE**-0.5
    own = []
    for _ in range(RANKS):
        weights, index = torch.rand(TOKENS, EXPERTS, generator=draw).topk(TOP_K, dim=-1)
        own.append((torch.randn(TOKENS, hidden_size, generator=draw).bfloat16(), index, weights))
    return gate_up, down, own


def dispatch(x: torch.Tensor, ids: torch.Tensor, rank: int, chip: str, **changed: Any) -> dict[str, torch.Tensor]:
    import torch_npu

    arguments = {
        "group_ep": distributed.group.WORLD.group_name if distributed.is_initialized() else "ep",
        "ep_world_size": RANKS,
        "ep_rank_id": rank,
        "moe_expert_num": EXPERTS,
        "quant_mode": 0,
        "global_bs": 0,
        "expert_token_nums_type": 1,
        "comm_alg": CHIPS[chip][0],
        **({"expert_scales": torch.ones(ids.shape)} if chip == A2 else {}),
        **changed,
    }
    return dict(zip(NAMES, torch_npu.npu_moe_distribute_dispatch_v2(x, ids, **arguments), strict=True))


def check(rank: int, chip: str) -> None:
    algorithm, size = CHIPS[chip]
    gate_up, down, own = drawn(size)
    hidden, index, weights = own[rank]
    mine = slice(rank * EXPERTS // RANKS, (rank + 1) * EXPERTS // RANKS)
    with emulated_npu(chip):
        import torch_npu

        ranks = Ranks(distributed.group.WORLD.group_name, RANKS, rank, EXPERTS, algorithm)
        got = experts_standard_over_ranks(torch_npu, ranks, hidden, index, weights, gate_up[mine], down[mine])
        sent = dispatch(hidden, index.int(), rank, chip)
        sums = dispatch(hidden, index.int(), rank, chip, expert_token_nums_type=0)["counts"]
        codes = dispatch(hidden, index.int(), rank, chip, quant_mode=2)
        refused(rank, chip, hidden, index.int(), sent)
    exact = experts_standard(hidden.double(), index, weights.double(), gate_up.double(), down.double())
    assert float((got.double() - exact).norm() / exact.norm()) < 2**-7
    rows = [
        own[source][0][token]
        for expert in range(mine.start, mine.stop)
        for source in range(RANKS)
        for token in range(TOKENS)
        if expert in own[source][1][token]
    ]
    valid = int(sent["counts"].sum())
    assert valid == len(rows) and torch.equal(sent["expand_x"][:valid], torch.stack(rows))
    assert sent["expand_x"][valid:].isnan().all() and torch.equal(sums, sent["counts"].cumsum(0))
    step = torch.stack(rows).double().abs().amax(dim=-1) / 127
    torch.testing.assert_close(codes["dynamic_scales"][:valid].double(), step, rtol=1e-5, atol=0.0)
    back = codes["expand_x"][:valid].double() * step[:, None]
    assert ((back - torch.stack(rows).double()).abs() <= 0.501 * step[:, None]).all()


def refused(rank: int, chip: str, hidden: torch.Tensor, ids: torch.Tensor, sent: dict[str, torch.Tensor]) -> None:
    """What only a running group shows: another rank's number, ranks that disagree, halves of different calls."""
    import torch_npu

    with pytest.raises(VendorRefusal, match="ep_world_size and ep_rank_id of the group, 2 and"):
        dispatch(hidden, ids, 1 - rank, chip)
    with pytest.raises(VendorRefusal, match="a group of ranks named 'other'"):
        dispatch(hidden, ids, rank, chip, group_ep="other")
    with pytest.raises(VendorRefusal, match="to be the same on all ranks"):
        dispatch(hidden, ids, rank, chip, global_bs=2 * TOKENS * (1 + rank))
    with pytest.raises(VendorRefusal, match="as one call of npu_moe_distribute_dispatch_v2 gave them"):
        torch_npu.npu_moe_distribute_combine_v2(
            sent["expand_x"],
            ids,
            torch.zeros_like(sent["assist"]),
            sent["received"],
            torch.ones(ids.shape),
            distributed.group.WORLD.group_name,
            RANKS,
            rank,
            EXPERTS,
            expand_scales=sent["scales"] if chip == A2 else None,
            global_bs=0,
            comm_quant_mode=0,
            comm_alg=CHIPS[chip][0],
        )


def process(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    for chip in CHIPS:
        check(rank, chip)
    distributed.destroy_process_group()


def test_two_ranks_share_the_experts(tmp_path: Path) -> None:
    multiprocessing.start_processes(process, args=(str(tmp_path / "rendezvous"),), nprocs=RANKS, start_method="spawn")


@pytest.mark.parametrize(
    ("chip", "hidden_size", "changed", "words"),
    [
        (A2, 64, {"ep_world_size": 9, "moe_expert_num": 9}, "ep_world_size to be one of 2, 3, 4"),
        (A2, 40, {}, "H a multiple of 32 to 7168 and at most 256 tokens"),
        (A2, 64, {"comm_alg": ""}, "comm_alg to be one of 'fullmesh'"),
        (A2, 64, {"expert_scales": None}, "expert_scales [tokens, k]"),
        (A3, 512, {}, "H from 1024 to 8192 and at most 512 tokens"),
        (A3, 1024, {"expert_scales": torch.ones(TOKENS, TOP_K)}, "takes with comm_alg 'hierarchy' alone"),
        (A2, 64, {"moe_expert_num": 5}, "a multiple of ep_world_size"),
        (A2, 64, {"ep_rank_id": 2}, "ep_rank_id from 0 to below ep_world_size"),
        (A2, 64, {"global_bs": 4}, "global_bs 0, or as many tokens"),
        (A2, 64, {"shared_expert_rank_num": 1}, "shared_expert_rank_num to be one of 0"),
        (A2, 64, {"quant_mode": 1}, "quant_mode to be one of 0, 2"),
    ],
)
def test_dispatch_refuses_in_words(chip: str, hidden_size: int, changed: dict[str, Any], words: str) -> None:
    ids = torch.tensor([[0, 1]] * TOKENS, dtype=torch.int32)
    with emulated_npu(chip), pytest.raises(VendorRefusal) as refusal:
        dispatch(torch.zeros(TOKENS, hidden_size).bfloat16(), ids, changed.pop("ep_rank_id", 0), chip, **changed)
    assert words in str(refusal.value)


def test_an_expert_twice_in_a_row_is_refused_and_a_missing_group_too() -> None:
    x, ids = torch.zeros(TOKENS, 64).bfloat16(), torch.zeros(TOKENS, TOP_K, dtype=torch.int32)
    with emulated_npu(A2):
        with pytest.raises(VendorRefusal, match="none twice in a row"):
            dispatch(x, ids, 0, A2)
        ids[:, 1] = 1
        with pytest.raises(VendorRefusal, match=r"needs torch\.distributed to be initialized"):
            dispatch(x, ids, 0, A2)


@pytest.mark.parametrize("name", ["npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine_v2"])
def test_arguments_that_both_halves_share_have_no_default(name: str) -> None:
    assert {"global_bs", "comm_alg"} <= set(catalogue()[name].explicit)
