"""How the parts of ranks are put together: ways of a layout file, sums, and what is wrong in such a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_layers import differences, fused_ranks
from torch import Tensor, nn

import porter
from porter.errors import PorterError
from porter.golden.shard_layout import read_layout, rules_of
from porter.golden.shard_sum import combined, copies_of
from porter.golden.shards import gather
from porter.golden.store import Golden


@pytest.mark.parametrize(
    ("way", "dealt"),
    [
        (
            {"parts": [2, 1, 1]},
            lambda w: [
                torch.cat(rows) for rows in zip(w[:16].chunk(2), w[16:24].chunk(2), w[24:].chunk(2), strict=True)
            ],
        ),
        ({"interleave": 4}, lambda w: [w.view(4, 2, 4, 7)[:, rank].reshape(16, 7) for rank in range(2)]),
        ({"concat": -1}, lambda w: list(w.chunk(2))),
    ],
)
def test_layouts(tmp_path: Path, way: Any, dealt: Callable[[Tensor], list[Tensor]]) -> None:
    weight = torch.randn(32, 7, generator=torch.Generator().manual_seed(0))
    layout = tmp_path / "layout.json"
    layout.write_text(json.dumps([{"module": "qkv_proj$|^$", "output": way}]))
    ranks = fused_ranks([part.contiguous() for part in dealt(weight)], tmp_path)
    gathered = gather(ranks, tmp_path / "g", read_layout(layout))
    whole = fused_ranks([weight], tmp_path / "whole")[0]
    assert max(differences(gathered, whole).values()) < 1e-6


def test_experts_numbered_from_zero_on_each_rank(tmp_path: Path) -> None:
    class Block(nn.Module):
        def __init__(self, first: int) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(2))
            for number, expert in enumerate(self.experts):
                nn.init.constant_(expert.weight, first + number)

        def forward(self, hidden: Tensor) -> Tensor:
            return torch.stack([expert(hidden) for expert in self.experts]).sum(0)

    goldens = []
    for rank in range(2):
        with porter.recording(block := Block(2 * rank), tmp_path / f"rank{rank}"), torch.no_grad():
            block(torch.ones(1, 3))
        goldens.append(Golden.open(tmp_path / f"rank{rank}"))
    layout = [{"module": r"experts\.\d+", "experts": "local"}, {"module": "^$", "output": "sum"}]
    gathered = gather(goldens, tmp_path / "g", rules_of(layout))
    outputs = {record.module: gathered.value(record.outputs)[0, 0].item() for record in gathered.records}
    assert outputs == {"experts.0": 0.0, "experts.1": 3.0, "experts.2": 6.0, "experts.3": 9.0, "": 18.0}
    assert [record.module for record in gathered.records][-1] == "", "a module comes after those within it"


def test_sums_are_rounded_once() -> None:
    parts = [torch.tensor([256.0]), torch.tensor([1.0]), torch.tensor([1.0]), torch.tensor([-256.0])]
    assert combined([part.to(torch.bfloat16) for part in parts], "sum").tolist() == [2.0]
    assert copies_of([["a"], ["a"], ["b"], ["b"]]) == 2 and copies_of([["a"], ["a"]]) == 2
    assert copies_of([["a"], ["b"], ["c"], ["d"]]) == 1 and copies_of([[], []]) == 1


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"output": "sum"}, "entry 0: expected an object with a regular expression"),
        ({"module": "("}, "no regular expression"),
        ({"module": "a", "outputs": "sum"}, "`outputs` is no field"),
        ({"module": "a", "output": "added"}, "output is 'added'"),
        ({"module": "a", "inputs": {"concat": "last"}}, "inputs is"),
        ({"module": "a", "output": {"parts": []}}, "output is"),
        ({"module": "a", "output": []}, "empty list"),
        ({"module": "a", "experts": "global"}, "the only word is local"),
    ],
)
def test_layout_errors(entry: Any, message: str) -> None:
    with pytest.raises(PorterError, match=message):
        rules_of([entry])
