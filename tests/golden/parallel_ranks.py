"""Tensor-parallel and expert-parallel ranks of tiny models, each with its slices of the weights, run in lockstep."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from porter.golden.capture import capture
from porter.golden.store import Golden

COLUMNS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")


class Group:
    """Sums over ranks that run in threads."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._barrier = threading.Barrier(world, timeout=60)
        self._held: list[Tensor | None] = [None] * world

    def all_reduce(self, rank: int, tensor: Tensor) -> Tensor:
        """The sum over the ranks, the same on each."""
        self._held[rank] = tensor
        self._barrier.wait()
        total = torch.stack([each for each in self._held if each is not None]).sum(dim=0)
        self._barrier.wait()
        return total

    def abort(self) -> None:
        self._barrier.abort()


def slice_of(tensor: Tensor, dim: int, rank: int, world: int, unit: int = 1) -> Tensor:
    """The rank's share along `dim`, in units; neighbours share a unit where there are fewer units than ranks."""
    units = tensor.shape[dim] // unit
    share = max(1, units // world)
    start = rank * units // world if units >= world else rank // (world // units)
    return tensor.narrow(dim, (start if units < world else rank * share) * unit, share * unit).clone()


def shard(model: Any, rank: int, world: int) -> Any:
    """A copy of the model with the rank's slices; heads are whole."""
    part = copy.deepcopy(model)
    config = part.config
    head = getattr(config, "v_head_dim", None) or config.head_dim
    units = {
        "q_proj": head, "k_proj": head, "v_proj": head, "o_proj": head,
        "q_b_proj": getattr(config, "qk_head_dim", 1), "kv_b_proj": getattr(config, "qk_nope_head_dim", 0) + head,
    }  # fmt: skip
    for name, module in part.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and leaf in (*COLUMNS, *ROWS):
            dim = 0 if leaf in COLUMNS else 1
            module.weight = nn.Parameter(slice_of(module.weight.data, dim, rank, world, units.get(leaf, 1)))
        if leaf == "self_attn":
            module.num_heads = config.num_attention_heads // world
            module.num_key_value_groups = max(1, config.num_attention_heads // world // _own_heads(config, world))
        if leaf == "experts":
            local = config.n_routed_experts // world
            for parameter in (module.gate_up_proj, module.down_proj):
                kept = parameter.data[rank * local : (rank + 1) * local].clone()
                parameter.data.zero_()[rank * local : (rank + 1) * local] = kept
    return part


def _own_heads(config: Any, world: int) -> int:
    return max(1, int(config.num_key_value_heads) // world)


def reduce_after(module: nn.Module, group: Group, rank: int, times: int = 1) -> None:
    """Let the module return its output summed over the ranks, `times` in a row."""
    forward = module.forward

    def reduced(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        for _ in range(times):
            first = group.all_reduce(rank, first)
        return (first, *output[1:]) if isinstance(output, tuple) else first

    module.forward = reduced  # type: ignore[method-assign]


def record_ranks(
    model: Any,
    world: int,
    folder: Path,
    tokens: Tensor,
    sums: Callable[[str], int],
    change: Callable[[int, Any], None] = lambda rank, part: None,
) -> list[Golden]:
    """The goldens of all ranks. `sums`: how often the output of a module of that name is summed over the ranks."""
    group = Group(world)
    parts = [shard(model, rank, world) for rank in range(world)]
    for rank, part in enumerate(parts):
        change(rank, part)
        for name, module in list(part.named_modules()):
            if times := sums(name):
                reduce_after(module, group, rank, times)
    goldens: list[Golden | BaseException | None] = [None] * world

    def run(rank: int) -> None:
        try:
            goldens[rank] = capture(parts[rank], tokens, folder / f"rank{rank}", new_tokens=2)
        except BaseException as error:
            goldens[rank] = error
            group.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _all(goldens)


def _all(goldens: Sequence[Golden | BaseException | None]) -> list[Golden]:
    for golden in goldens:
        if isinstance(golden, BaseException):
            raise golden
    return [golden for golden in goldens if isinstance(golden, Golden)]
