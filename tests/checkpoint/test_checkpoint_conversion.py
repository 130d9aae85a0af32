"""Conversion: every source tensor accounted for, the same bytes with any number of workers, after any crash."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from raw_files import single
from small_conversion import OUTPUTS, Compute, contents, quantized, refusal, source, writer_of

from porter.checkpoint.convert import Output, convert
from porter.checkpoint.reader import Checkpoint
from porter.checkpoint.writer import TensorPlan
from porter.quantization import quantize_per_channel


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
