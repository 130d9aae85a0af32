"""Conversion: every source tensor accounted for, the same bytes with any number of workers, after any crash."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import convert_slowly
import pytest
import torch
from raw_files import single

from porter.checkpoint.convert import Output, convert, source_identity
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


def test_bytes_do_not_depend_on_workers(tmp_path: Path) -> None:
    checkpoint = source(tmp_path / "source")
    for workers in (1, 2, 5):
        writer = writer_of(tmp_path / f"out{workers}")
        convert(checkpoint, OUTPUTS, writer, workers=workers)
        writer.finish()
    first = contents(tmp_path / "out1")
    assert len(first) > 3
    assert first == contents(tmp_path / "out2") == contents(tmp_path / "out5")
    result = Checkpoint.open(tmp_path / "out1")
    codes, scale = quantize_per_channel(torch.cat([checkpoint.load("q.3"), checkpoint.load("k.3")]))
    assert torch.equal(result.load("qkv.3"), codes) and torch.equal(result.load("qkv.3_scale"), scale)


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    writer = writer_of(tmp_path / "out")
    convert(source(tmp_path / "source"), OUTPUTS, writer, workers=3, progress=lambda *call: calls.append(call))
    total = writer.layout.total_bytes
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)
    assert calls[-1][0] == total and {t for _, t, _ in calls} == {total} and len(calls) == 14


def test_accounting(tmp_path: Path) -> None:
    checkpoint = source(tmp_path / "source", rope=torch.ones(3), mask=torch.ones(1))
    at, out = tmp_path / "source", tmp_path / "out"
    assert refusal(checkpoint, OUTPUTS, writer_of(out)) == (
        f"{at}: 2 tensors are neither converted nor dropped (mask, rope); name them in dropped if the model does not "
        "need them"
    )
    assert refusal(checkpoint, OUTPUTS, writer_of(out), dropped=["rope", "mask", "q.0"]) == (
        f"{at}: 1 tensors are both converted and dropped (q.0); choose one"
    )
    assert refusal(checkpoint, OUTPUTS, writer_of(out), dropped=["rope", "mask", "rpoe"]) == (
        f"{at}: lacks 1 tensors that the conversion reads or drops (rpoe)"
    )
    stranger = [*OUTPUTS, quantized("v", ("v.0",), (3, 6))]
    assert refusal(checkpoint, stranger, writer_of(out, stranger), dropped=["rope", "mask"]) == (
        f"{at}: lacks 1 tensors that the conversion reads or drops (v.0)"
    )
    unplanned = f"{out}: 2 tensors are not planned once and alike by writer and outputs (qkv.6, qkv.6_scale)"
    for outputs, planned in ((OUTPUTS, OUTPUTS[:-1]), ([*OUTPUTS, OUTPUTS[-1]], OUTPUTS)):
        assert refusal(checkpoint, outputs, writer_of(out, planned), dropped=["rope", "mask"]) == unplanned
    reshaped = [*OUTPUTS[:-1], quantized("qkv.6", ("q.6", "k.6"), (6, 11))]
    assert "(qkv.6, qkv.6_scale)" in refusal(checkpoint, reshaped, writer_of(out), dropped=["rope", "mask"])
    assert refusal(checkpoint, OUTPUTS, writer_of(out), dropped=["rope", "mask"], workers=0) == (
        "--workers 0: expected at least 1"
    )
    assert not (tmp_path / "out.partial").exists(), "refused before any work"
    writer = writer_of(out)
    convert(checkpoint, OUTPUTS, writer, dropped=["rope", "mask"])
    writer.finish()


def test_a_source_may_feed_two_outputs(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(single(tmp_path / "source", {"embed": torch.randn(3, 6)}))
    outputs = [
        quantized("head", ("embed",), (3, 6)),
        Output((TensorPlan("embed", torch.float32, (3, 6)),), ("embed",), lambda parts: {"embed": parts[0]}),
    ]
    writer = writer_of(tmp_path / "out", outputs)
    convert(checkpoint, outputs, writer)
    assert torch.equal(Checkpoint.open(writer.finish()).load("embed"), checkpoint.load("embed"))


def stacked(pieces: int) -> Output:
    """The first three groups of `OUTPUTS` as one stack [3, 11, 6]."""

    def compute(parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        groups = [torch.cat(parts[i : i + 2]) for i in range(0, len(parts), 2)]
        codes, scale = quantize_per_channel(torch.stack(groups))
        return {"stack": codes, "stack_scale": scale}

    sources = tuple(f"{x}.{i}" for i in range(3) for x in "qk")
    return Output(quantized("stack", (), (3, 11, 6)).plans, sources, compute, pieces)


def test_pieces_give_the_same_bytes(tmp_path: Path) -> None:
    checkpoint = source(tmp_path / "source")
    dropped = [n for n in checkpoint.names if int(n[2:]) > 2]
    for pieces in (1, 3):
        writer = writer_of(tmp_path / f"out{pieces}", [stacked(pieces)])
        convert(checkpoint, [stacked(pieces)], writer, dropped=dropped)
        writer.finish()
    assert contents(tmp_path / "out1") == contents(tmp_path / "out3")
    for pieces in (0, 4):
        text = refusal(checkpoint, [stacked(pieces)], writer_of(tmp_path / "bad", [stacked(1)]), dropped=dropped)
        assert text == f"{tmp_path}/bad: tensor stack: 6 sources do not make {pieces} equal pieces"


def test_a_piece_that_fails_leaves_its_tensors_unwritten(tmp_path: Path) -> None:
    checkpoint = source(tmp_path / "source", **{"k.2": torch.full((3, 6), float("nan"))})
    dropped = [n for n in checkpoint.names if int(n[2:]) > 2]
    writer = writer_of(tmp_path / "out", [stacked(3)])
    assert refusal(checkpoint, [stacked(3)], writer, dropped=dropped).startswith("tensor k.2: holds 18 NaN and 0")
    assert writer.digests == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers(tmp_path: Path, value: float) -> None:
    outputs = [Output((TensorPlan("w", torch.float16, (3,)),), ("w",), lambda parts: {"w": parts[0].half()})]
    bad = Checkpoint.open(single(tmp_path / "bad", {"w": torch.tensor([1.0, value, 2.0])}))
    assert "tensor w: holds" in refusal(bad, outputs, writer_of(tmp_path / "out", outputs))
    writer = writer_of(tmp_path / "out", outputs)
    convert(bad, outputs, writer, allow_nonfinite=True)
    assert torch.equal(Checkpoint.open(writer.finish()).load("w").isfinite(), torch.tensor([True, False, True]))
    large = Checkpoint.open(single(tmp_path / "large", {"w": torch.tensor([1.0, 1e6, 2.0])}))
    text = refusal(large, outputs, writer_of(tmp_path / "overflown", outputs))
    assert text.startswith("tensor w: holds 0 NaN and 1 infinite of 3 values"), "a result is checked as well"


def test_results_that_differ_from_their_plan(tmp_path: Path) -> None:
    checkpoint, out = source(tmp_path / "source"), tmp_path / "out"

    def convert_with(compute: Compute) -> str:
        outputs = [*OUTPUTS[:-1], quantized("qkv.6", ("q.6", "k.6"), (11, 6), compute)]
        return refusal(checkpoint, outputs, writer_of(out, outputs), workers=2)

    codes, scale = torch.zeros(11, 6, dtype=torch.int8), torch.ones(11)
    assert convert_with(lambda parts: {"qkv.6": codes}) == (
        f"{out}: computing qkv.6 gave qkv.6, planned qkv.6, qkv.6_scale"
    )
    assert "computing qkv.6 gave other, qkv.6, qkv.6_scale" in convert_with(
        lambda parts: {"qkv.6": codes, "qkv.6_scale": scale, "other": scale}
    )
    assert "tensor qkv.6 is torch.int8 [6, 11], planned torch.int8 [11, 6]" in convert_with(
        lambda parts: {"qkv.6": codes.t(), "qkv.6_scale": scale}
    )
    assert "qkv.6_scale is torch.float64 [11], planned torch.float32 [11]" in convert_with(
        lambda parts: {"qkv.6": codes, "qkv.6_scale": scale.double()}
    )


def test_errors_of_a_computation_name_its_tensor(tmp_path: Path) -> None:
    outputs = [quantized("w", ("w",), (2, 2))]
    checkpoint = Checkpoint.open(single(tmp_path / "source", {"w": torch.tensor([[1.0, float("nan")], [0.0, 0.0]])}))
    text = refusal(checkpoint, outputs, writer_of(tmp_path / "out", outputs), allow_nonfinite=True)
    assert text.startswith("tensor w: quantize_per_channel: weight holds NaN, infinity or a row beyond float32")


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
