"""Conversions that fail, stop or are killed: what is done is kept, and memory stays bounded."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import convert_slowly
import pytest
import torch
from raw_files import single
from small_conversion import HERE, OUTPUTS, contents, quantized, refusal, source, writer_of

from porter.checkpoint.convert import Output, convert, source_identity
from porter.checkpoint.reader import Checkpoint
from porter.checkpoint.writer import TensorPlan
from porter.errors import PorterError
from porter.quantization import quantize_per_channel


def test_a_failure_stops_the_rest_and_keeps_what_is_done(tmp_path: Path) -> None:
    checkpoint, begun = source(tmp_path / "source"), []

    def failing(parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        raise PorterError("no")

    def counted(output: Output) -> Output:
        def compute(parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
            begun.append(output.plans[0].name)
            return output.compute(parts)

        return Output(output.plans, output.sources, compute)

    outputs = [counted(output) for output in OUTPUTS]
    broken = [*outputs[:2], quantized("qkv.2", ("q.2", "k.2"), (11, 6), failing), *outputs[3:]]
    assert refusal(checkpoint, broken, writer_of(tmp_path / "out")) == "tensor qkv.2: no"
    assert begun == ["qkv.0", "qkv.1"]
    writer = writer_of(tmp_path / "out")
    convert(checkpoint, outputs, writer)
    writer.finish()
    assert begun[2:] == [f"qkv.{i}" for i in range(2, 7)], "resumed after what was done"


def test_an_interrupted_conversion_keeps_what_is_done(tmp_path: Path) -> None:
    checkpoint, writer, names = source(tmp_path / "source"), writer_of(tmp_path / "out"), []

    def interrupting(done: int, total: int, name: str) -> None:
        names.append(name)
        if len(names) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(checkpoint, OUTPUTS, writer, progress=interrupting)
    writer = writer_of(tmp_path / "out")
    assert names[:4] == ["qkv.0", "qkv.0_scale", "qkv.1", "qkv.1_scale"]
    assert writer.start(source_identity(checkpoint, allow_nonfinite=False)) == set(names)
    writer.close()


def test_an_output_finished_in_part_is_completed(tmp_path: Path) -> None:
    checkpoint, writer = source(tmp_path / "source"), writer_of(tmp_path / "out")
    writer.start(source_identity(checkpoint, allow_nonfinite=False))
    writer.write("qkv.4_scale", quantize_per_channel(torch.cat([checkpoint.load("q.4"), checkpoint.load("k.4")]))[1])
    writer.close()
    writer = writer_of(tmp_path / "out")
    written: list[str] = []
    convert(checkpoint, OUTPUTS, writer, progress=lambda done, total, name: written.append(name))
    assert "qkv.4" in written and "qkv.4_scale" not in written and len(written) == 13
    writer.finish()
    fresh = writer_of(tmp_path / "fresh")
    convert(checkpoint, OUTPUTS, fresh)
    fresh.finish()
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_what_allow_nonfinite_let_pass_is_not_taken_over(tmp_path: Path) -> None:
    outputs = [Output((TensorPlan(n, torch.float16, (3,)),), (n,), lambda p, n=n: {n: p[0].half()}) for n in "ab"]  # type: ignore[misc]
    bad = Checkpoint.open(single(tmp_path / "bad", {"a": torch.full((3,), float("nan")), "b": torch.ones(3)}))
    writer = writer_of(tmp_path / "out", outputs)
    convert(bad, outputs, writer, allow_nonfinite=True)
    writer.close()
    assert "tensor a: holds 3 NaN" in refusal(bad, outputs, writer_of(tmp_path / "out", outputs))


def test_workers_hold_one_output_each(tmp_path: Path) -> None:
    """With the first worker held up inside its computation the second goes on, and no third begins."""
    running, most, both = set(), [0], threading.Barrier(2, timeout=30)

    def slow(output: Output, place: int) -> Output:
        def compute(parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
            running.add(place)
            most[0] = max(most[0], len(running))
            if place < 2:
                both.wait()
            running.discard(place)
            return output.compute(parts)

        return Output(output.plans, output.sources, compute)

    outputs = [slow(output, place) for place, output in enumerate(OUTPUTS)]
    convert(source(tmp_path / "source"), outputs, writer_of(tmp_path / "out"), workers=2)
    assert most[0] == 2


def python(script: str, *arguments: object) -> tuple[list[str], dict[str, str]]:
    # Tensors above 64 KB in mappings of their own, given back when freed: what is resident is what is in use.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    return [sys.executable, str(HERE / script), *map(str, arguments)], environment


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is reset through /proc")
def test_memory_is_bounded_by_the_groups_in_flight(tmp_path: Path) -> None:
    """96 MB in and 24 MB out, in groups of 2 x 2 MB: a conversion that kept them would need 96 MB more.

    Per worker: 4 MB of sources, twice 4 MB joined, 2 MB of codes, and 4 blocks of 1 MB while quantizing: 18 MB. The
    same as one stack of groups converted piece by piece.
    """
    command, environment = python("measure_memory.py", tmp_path)
    measured = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    streamed, stacked, kept = map(int, measured.stdout.split())
    assert streamed < 40e6, f"{streamed / 1e6:.0f} MB"
    assert stacked < 40e6, f"{stacked / 1e6:.0f} MB"
    assert kept > 96e6, f"the measure itself must see sources that are kept: {kept / 1e6:.0f} MB"


def test_killed_in_the_middle_then_resumed(tmp_path: Path) -> None:
    """kill -9 from outside once a few tensors are journalled; the next run goes on and ends in the same bytes."""
    command, environment = python("convert_slowly.py", tmp_path, "out", 0.05)
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(6):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (tmp_path / "out").exists()
    with pytest.raises(PorterError, match="is an unfinished conversion"):
        Checkpoint.open(tmp_path / "out.partial")
    command, environment = python("convert_slowly.py", tmp_path, "out", 0)
    resumed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found = re.search(r"resuming, (\d+) of 40 tensors are done", resumed.stderr)
    assert found and 4 <= int(found.group(1)) < 40
    assert len(resumed.stdout.split()) == 40 - int(found.group(1))
    convert_slowly.main(tmp_path, "fresh", 0.0)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_killed_at_every_step(tmp_path: Path) -> None:
    """A conversion is killed at its 1st, 2nd, ... flush, rename, removal and write, and resumed each time."""
    command, environment = python("crash_everywhere.py", tmp_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    points, whole = map(int, done.stdout.split())
    assert points > 25 and whole >= 1
