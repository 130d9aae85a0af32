"""A small checkpoint of every kind of tensor, and writing it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from porter.checkpoint.writer import CheckpointWriter, TensorPlan
from porter.errors import PorterError

TENSORS = {
    "a": torch.randn(5, 3),
    "codes": torch.arange(-3, 4, dtype=torch.int8),
    "b": torch.randn(2, 2, 2).to(torch.bfloat16),
    "scalar": torch.tensor(1.5, dtype=torch.float64),
    "empty": torch.zeros(0, 9),
}


def planned(tensors: dict[str, torch.Tensor]) -> list[TensorPlan]:
    return [TensorPlan(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]


def write(directory: Path, tensors: dict[str, torch.Tensor] = TENSORS, shard_bytes: int = 10**9) -> Path:
    writer = CheckpointWriter(directory, planned(tensors), shard_bytes=shard_bytes)
    for name, tensor in reversed(tensors.items()):
        writer.write(name, tensor)
    return writer.finish()


def refuses(call: object, *arguments: object) -> str:
    with pytest.raises(PorterError) as caught:
        call(*arguments)  # type: ignore[operator]
    assert str(caught.value).isprintable()
    return str(caught.value)
