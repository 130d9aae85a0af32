"""Print by how many bytes a conversion raises the peak of resident memory. Argument: DIRECTORY.

Two numbers: of one that streams, then of one whose computations keep every source.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from raw_files import sharded, write_index

from porter.checkpoint.convert import Output, convert
from porter.checkpoint.reader import Checkpoint
from porter.checkpoint.writer import CheckpointWriter, TensorPlan
from porter.quantization import quantize_per_channel

GROUPS, ROWS, COLUMNS = 24, 1024, 1024
kept: list[torch.Tensor] = []


def status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    line = next(ln for ln in Path("/proc/self/status").read_text().splitlines() if ln.startswith(field))
    return int(line.split()[1]) * 1024


def output(group: int, keep: bool) -> Output:
    name = f"w.{group}"

    def compute(parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        if keep:
            kept.extend(parts)
        codes, scale = quantize_per_channel(torch.cat(parts))
        return {name: codes, f"{name}_scale": scale}

    plans = (TensorPlan(name, torch.int8, (2 * ROWS, COLUMNS)), TensorPlan(f"{name}_scale", torch.float32, (2 * ROWS,)))
    return Output(plans, (f"a.{group}", f"b.{group}"), compute)


def run(source: Path, target: Path, groups: range, keep: bool) -> None:
    checkpoint = Checkpoint.open(source)
    outputs = [output(group, keep) for group in groups]
    used = {name for item in outputs for name in item.sources}
    writer = CheckpointWriter(target, [plan for item in outputs for plan in item.plans], shard_bytes=8_000_000)
    convert(checkpoint, outputs, writer, workers=2, dropped=[n for n in checkpoint.names if n not in used])
    writer.finish()


def write_source(source: Path) -> None:
    """96 MB in 4 shards, written one at a time."""
    for shard in range(4):
        groups = range(shard * 6, shard * 6 + 6)
        tensors = {f"{x}.{i}": torch.randn(ROWS, COLUMNS).to(torch.bfloat16) for i in groups for x in "ab"}
        sharded(source, {f"{shard}.safetensors": tensors})
    write_index(source, {f"{x}.{i}": f"{i // 6}.safetensors" for i in range(GROUPS) for x in "ab"})


def main(directory: Path) -> None:
    write_source(directory / "source")
    run(directory / "source", directory / "warm", range(2), keep=False)
    for mode in ("stream", "keep"):
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        run(directory / "source", directory / mode, range(GROUPS), keep=mode == "keep")
        print(status("VmHWM") - before)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
