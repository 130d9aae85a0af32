"""Print by how many bytes a conversion raises the peak of resident memory. Argument: DIRECTORY.

Three numbers: of one that streams 24 groups, of one that stacks them in 24 pieces of one tensor, and of one whose
computations keep every source.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
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


def quantizing(name: str, keep: bool) -> Callable[[list[torch.Tensor]], dict[str, torch.Tensor]]:
    def compute(parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        if keep:
            kept.extend(parts)
        codes, scale = quantize_per_channel(torch.stack([torch.cat(parts)]))
        return {name: codes, f"{name}_scale": scale}

    return compute


def output(name: str, groups: range, keep: bool) -> Output:
    """The groups stacked in one tensor [groups, 2 ROWS, COLUMNS], one after the other."""
    shape = (len(groups), 2 * ROWS)
    plans = (TensorPlan(name, torch.int8, (*shape, COLUMNS)), TensorPlan(f"{name}_scale", torch.float32, shape))
    sources = tuple(f"{x}.{group}" for group in groups for x in "ab")
    return Output(plans, sources, quantizing(name, keep), len(groups))


def run(source: Path, target: Path, outputs: list[Output]) -> None:
    checkpoint = Checkpoint.open(source)
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
    run(directory / "source", directory / "warm", [output("w", range(2), False)])
    trials = {
        "streamed": [output(f"w.{i}", range(i, i + 1), False) for i in range(GROUPS)],
        "stacked": [output(f"w.{i}", range(i, i + GROUPS // 2), False) for i in (0, GROUPS // 2)],
        "kept": [output(f"w.{i}", range(i, i + 1), True) for i in range(GROUPS)],
    }
    for name, outputs in trials.items():
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        run(directory / "source", directory / name, outputs)
        print(status("VmHWM") - before)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
