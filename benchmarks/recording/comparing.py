"""What comparing two recordings costs, and aligning them.

    python benchmarks/recording/comparing.py [--threads 1] [--gigabytes 0] [--align]

Records the 8-layer Qwen3 in float32 and in bfloat16, 128 tokens, and compares every floating-point tensor.
`--gigabytes N` then compares two made-up recordings of N GB each, whose tensors all differ, and prints GB/s and the
peak memory; `--align` aligns the two models' recordings as a whole.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from timed_models import build
from torch import nn

from porter.golden.comparison import compare
from porter.golden.recorder import recording
from porter.golden.store import Golden


class Noise(nn.Module):
    """Returns its argument with noise: a layer whose output never repeats."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Same shape."""
        return hidden + torch.randn_like(hidden)


def timed_comparison(paths: list[Path]) -> None:
    """Compare and print."""
    size = sum(file.stat().st_size for path in paths for file in path.iterdir())
    wall, processor = time.perf_counter(), time.process_time()
    rows = list(compare(*(Golden.open(path) for path in paths)))
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    uncompared = sum(row.distance is None for row in rows)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(
        f"{len(rows)} rows ({uncompared} not compared), {size / 1e9:.2f} GB: wall {wall:.2f} s, processor "
        f"{processor:.2f} s, {size / wall / 1e9:.2f} GB/s, peak memory of the process {peak:.0f} MB"
    )


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--gigabytes", type=float, default=0)
    parser.add_argument("--align", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
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
            timed_comparison(large)
        if asked.align:
            command = [str(Path(sys.executable).with_name("porter")), "align", *map(str, paths), "--json"]
            start = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True)
            seconds, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
            print(
                f"porter align, a process of its own: {json.loads(done.stdout)['verdict']}, wall {seconds:.1f} s, "
                f"processor {used.ru_utime + used.ru_stime:.1f} s, peak memory {used.ru_maxrss / 1e3:.0f} MB"
            )


if __name__ == "__main__":
    main()
