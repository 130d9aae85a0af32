"""Ranks of one fused layer, recorded, and how far a gathered golden is from the whole model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import porter
from porter.golden.store import Golden


class Fused(nn.Module):
    """One rank of a layer with fused query, key and value rows, or with heads that are dealt out in turn."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.qkv_proj.weight = nn.Parameter(weight)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.qkv_proj(hidden)
        return found


def fused_ranks(weights: list[Tensor], folder: Path) -> list[Golden]:
    """A golden per weight, each of the same input."""
    hidden = torch.randn(2, 3, weights[0].shape[1], generator=torch.Generator().manual_seed(1))
    paths = []
    for rank, weight in enumerate(weights):
        model = Fused(weight)
        with porter.recording(model, folder / f"rank{rank}"), torch.no_grad():
            model(hidden)
        paths.append(Golden.open(folder / f"rank{rank}"))
    return paths


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for child in children for tensor in _tensors(child)]


def differences(gathered: Golden, whole: Golden) -> dict[str, float]:
    """The largest difference per module, inputs and outputs, over all calls."""
    found: dict[str, float] = {}
    missed = {entry["module"] for entry in gathered.manifest["missed"]}
    kept = [record for record in whole.records if record.module not in missed]
    for mine, theirs in zip(gathered.records, kept, strict=True):
        assert (mine.module, mine.step, mine.call) == (theirs.module, theirs.step, theirs.call)
        for node, other in ((mine.inputs, theirs.inputs), (mine.outputs, theirs.outputs)):
            for a, b in zip(_tensors(gathered.value(node)), _tensors(whole.value(other)), strict=True):
                assert a.shape == b.shape and a.dtype == b.dtype, mine.module
                far = float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))
                found[mine.module] = max(found.get(mine.module, 0.0), far)
    return found
