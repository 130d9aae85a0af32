"""A small conversion, seven fused and quantized pairs, and what it writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from raw_files import single

from porter.checkpoint.convert import Output, convert
from porter.checkpoint.reader import Checkpoint
from porter.checkpoint.writer import CheckpointWriter, TensorPlan
from porter.errors import PorterError
from porter.quantization import quantize_per_channel

HERE = Path(__file__).parent
Compute = Callable[[list[torch.Tensor]], dict[str, torch.Tensor]]


def quantized(name: str, sources: tuple[str, ...], shape: tuple[int, ...], compute: Compute | None = None) -> Output:
    def joined(parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        codes, scale = quantize_per_channel(torch.cat(parts))
        return {name: codes, f"{name}_scale": scale}

    plans = (TensorPlan(name, torch.int8, shape), TensorPlan(f"{name}_scale", torch.float32, shape[:-1]))
    return Output(plans, sources, compute or joined)


OUTPUTS = [quantized(f"qkv.{i}", (f"q.{i}", f"k.{i}"), (11, 6)) for i in range(7)]


def source(directory: Path, **extra: torch.Tensor) -> Checkpoint:
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for i in range(7):
        tensors[f"q.{i}"] = torch.randn(8, 6, generator=generator)
        tensors[f"k.{i}"] = torch.randn(3, 6, generator=generator)
    return Checkpoint.open(single(directory, {**tensors, **extra}))


def writer_of(directory: Path, outputs: list[Output] = OUTPUTS) -> CheckpointWriter:
    return CheckpointWriter(directory, [p for o in outputs for p in o.plans], shard_bytes=200)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def refusal(checkpoint: Checkpoint, outputs: list[Output], writer: CheckpointWriter, **keywords: object) -> str:
    with pytest.raises(PorterError) as caught:
        convert(checkpoint, outputs, writer, **keywords)  # type: ignore[arg-type]
    assert str(caught.value).isprintable() and not writer.target.exists()
    return str(caught.value)
