"""What comparing two recordings costs, and aligning them.

    python benchmarks/recording/comparing.py [--threads 1] [--gigabytes 0] [--align]

Records the 8-layer Qwen3 in float32 and in bfloat16, 128 tokens, and compares every floating-point tensor.
`--gigabytes N` then compares two made-up recordings of N GB each, whose tensors all differ, in a process of its own and
read from disk, beside reading the same bytes alone; `--align` aligns the two models' recordings as a whole.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from timed_models import build
from torch import nn

from porter.golden.comparison import compare
from porter.golden.format import TENSORS
from porter.golden.recorder import recording
from porter.golden.store import Golden


class Noise(nn.Module):
    """Returns its argument with noise: a layer whose output never repeats."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Same shape."""
        return hidden + torch.randn_like(hidden)


ALIGN = (
    "import sys; from porter.cli.app import run; run(sys.argv[1:]); sys.stderr.write(open('/proc/self/status').read())"
)


def peak_of(status: str) -> float:
    """Peak memory in MB from /proc/self/status: getrusage's also counts what the process was forked from."""
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024 / 1e6


def timed_comparison(paths: list[Path]) -> None:
    """Compare and print."""
    size = sum(file.stat().st_size for path in paths for file in path.iterdir())
    wall, processor = time.perf_counter(), time.process_time()
    rows = list(compare(*(Golden.open(path) for path in paths)))
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    uncompared = sum(row.distance is None for row in rows)
    peak = peak_of(Path("/proc/self/status").read_text())
    print(
        f"{len(rows)} rows ({uncompared} not compared), {size / 1e9:.2f} GB: wall {wall:.2f} s, processor "
        f"{processor:.2f} s, {size / wall / 1e9:.2f} GB/s, peak memory of the process {peak:.0f} MB"
    )


def let_go(paths: list[Path]) -> None:
    """Have the files read from disk the next time."""
    for path in paths:
        with (path / TENSORS).open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_alone(paths: list[Path]) -> None:
    """Read both files side by side and print how fast that is: what comparing is bounded by."""
    let_go(paths)
    buffer, total, start = bytearray(2**24), 0, time.perf_counter()
    with ExitStack() as stack:
        files = [stack.enter_context((path / TENSORS).open("rb", buffering=0)) for path in paths]
        while count := sum(file.readinto(buffer) or 0 for file in files):
            total += count
    seconds = time.perf_counter() - start
    print(f"reading {total / 1e9:.2f} GB alone: {seconds:.2f} s, {total / seconds / 1e9:.2f} GB/s", flush=True)


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--gigabytes", type=float, default=0)
    parser.add_argument("--align", action="store_true")
    parser.add_argument("--compare", nargs=2, type=Path, help="two goldens: compare these alone, in this process")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    if asked.compare:
        let_go(asked.compare)
        timed_comparison(asked.compare)
        return
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        paths = [Path(folder) / dtype for dtype in ("float32", "bfloat16")]
        for path in paths:
            model, tokens = build("qwen3-8x512", path.name, 128)
            with recording(model, path, store_weights=asked.align):
                model(input_ids=tokens, use_cache=False)
        del model
        timed_comparison(paths)
        if asked.gigabytes:
            noise = nn.Sequential(*(Noise() for _ in range(int(asked.gigabytes * 1e9 / 2**24))))
            large = [Path(folder) / name for name in ("large", "other")]
            for path in large:
                with recording(noise, path, store_weights=False):
                    noise(torch.zeros(2**22))
            read_alone(large)
            # A process of its own: what it needs at most is not what recording needed.
            subprocess.run([sys.executable, __file__, "--threads", str(asked.threads), "--compare", *map(str, large)])
        if asked.align:
            command = [sys.executable, "-c", ALIGN, "align", *map(str, paths), "--json"]
            start = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True)
            seconds, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
            print(
                f"porter align, a process of its own: {json.loads(done.stdout)['verdict']}, wall {seconds:.1f} s, "
                f"processor {used.ru_utime + used.ru_stime:.1f} s, peak memory {peak_of(done.stderr):.0f} MB"
            )


if __name__ == "__main__":
    main()
