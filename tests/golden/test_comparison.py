"""Comparing two recordings: every row against float64, and what could not be compared is said."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from porter.golden.comparison import compare, difference
from porter.golden.recorder import recording
from porter.golden.store import Golden

Build = Callable[..., nn.Module]
FLOATS = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
TOKENS = torch.arange(40).view(1, 40)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("other", FLOATS)
@pytest.mark.parametrize("shape", [(1,), (7, 13), (3, 5, 9001)])
def test_difference(dtype: torch.dtype, other: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    golden = torch.randn(shape, generator=generator, dtype=torch.float64)
    candidate = (golden + 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(other)
    golden = golden.to(dtype)
    a, b = candidate.double(), golden.double()
    found = difference(candidate, golden)
    # The kernels sum products in float32 over at most 128 elements.
    assert found.error == pytest.approx(float((a - b).norm() / b.norm()), rel=1e-5, abs=1e-12)
    assert found.cosine == pytest.approx(float((a * b).sum() / a.norm() / b.norm()), abs=1e-6)
    assert found.largest == pytest.approx(float((a - b).abs().max()), rel=1e-6)


def test_extremes() -> None:
    ones = torch.ones(5000)
    assert difference(ones * 1e30, ones * 2e30).error == pytest.approx(0.5)
    assert difference(ones * 1e-30, ones * 2e-30).error == pytest.approx(0.5)
    assert difference(ones, ones * 0).error == math.inf and difference(ones * 0, ones * 0).error == 0
    assert math.isnan(difference(ones.clone().fill_(math.nan), ones).error)
    assert difference(torch.empty(0), torch.empty(0)).error == 0


def _recorded(model: nn.Module, path: Path, detail: str = "full") -> Golden:
    with torch.no_grad(), recording(model, path, detail=detail, store_weights=False):
        model(TOKENS)
    return Golden.open(path)


def test_rows_are_the_errors_of_the_tensors(qwen3: Build, tmp_path: Path) -> None:
    one, two = _recorded(qwen3(), tmp_path / "one"), _recorded(qwen3().bfloat16(), tmp_path / "two")
    rows = {(row.module, row.place): row for row in compare(one, two)}
    assert all(row.distance is not None for row in rows.values())
    mine, theirs = (golden.value(golden.records[-1].outputs).logits.double() for golden in (one, two))
    distance = rows["", "outputs.logits"].distance
    assert distance is not None
    assert distance.error == pytest.approx(float((mine - theirs).norm() / mine.norm()), rel=1e-5)
    assert 0 < distance.error < 0.1 and distance.deviation == 0


def test_equal_recordings_are_not_read(qwen3: Build, tmp_path: Path) -> None:
    one, two = (_recorded(qwen3(), tmp_path / name) for name in ("one", "two"))
    (tmp_path / "two" / "tensors.bin").write_bytes(b"")
    assert all(row.distance is not None and row.distance.error == 0 for row in compare(one, two))


def test_sketches_estimate_and_statistics_do_not(qwen3: Build, tmp_path: Path) -> None:
    models = qwen3(vocab_size=2000), qwen3(vocab_size=2000).bfloat16().float()
    errors = {}
    for detail in ("full", "sketch", "stats"):
        goldens = [_recorded(model, tmp_path / f"{detail}{number}", detail) for number, model in enumerate(models)]
        errors[detail] = next(row for row in compare(*goldens) if row.place == "outputs.logits")
    exact, estimate = errors["full"].distance, errors["sketch"].distance
    assert exact is not None and estimate is not None and estimate.deviation > 0
    assert abs(estimate.error - exact.error) < 5 * estimate.deviation
    assert errors["stats"].distance is None and errors["stats"].why == "recorded as statistics alone"


def test_what_is_missing_or_shaped_otherwise_is_said(qwen3: Build, tmp_path: Path) -> None:
    one, two = _recorded(qwen3(), tmp_path / "one"), _recorded(qwen3(num_hidden_layers=1), tmp_path / "two")
    why = {row.module: row.why for row in compare(one, two) if row.distance is None}
    assert why["model.layers.1.mlp"] == "not in the other recording" and "model.layers.0.mlp" not in why
    wide = _recorded(qwen3(intermediate_size=48), tmp_path / "wide")
    why = {row.module: row.why for row in compare(one, wide) if row.distance is None}
    assert why["model.layers.0.mlp.up_proj"] == "shapes are [1, 40, 44] and [1, 40, 48]"
