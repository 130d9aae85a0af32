"""Convert 20 small groups, one line on stdout per tensor written. Arguments: DIRECTORY OUTPUT SECONDS-PER-GROUP."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from raw_files import single

from porter.checkpoint.convert import Output, convert
from porter.checkpoint.reader import Checkpoint
from porter.checkpoint.writer import CheckpointWriter, TensorPlan
from porter.quantization import quantize_per_channel


def main(directory: Path, name: str, seconds: float) -> None:
    source = directory / "source"
    if not source.exists():
        generator = torch.Generator().manual_seed(2)
        single(source, {f"w.{i}": torch.randn(61, 53, generator=generator) for i in range(20)})

    def output(source_name: str) -> Output:
        def compute(parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
            time.sleep(seconds)
            codes, scale = quantize_per_channel(parts[0])
            return {source_name: codes, f"{source_name}_scale": scale}

        plans = (
            TensorPlan(source_name, torch.int8, (61, 53)),
            TensorPlan(f"{source_name}_scale", torch.float32, (61,)),
        )
        return Output(plans, (source_name,), compute)

    outputs = [output(f"w.{i}") for i in range(20)]
    plans = [plan for item in outputs for plan in item.plans]
    writer = CheckpointWriter(directory / name, plans, shard_bytes=9000, commit_bytes=1)

    def progress(done: int, total: int, tensor: str) -> None:
        print(tensor, flush=True)

    convert(Checkpoint.open(source), outputs, writer, workers=2, progress=progress)
    writer.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
