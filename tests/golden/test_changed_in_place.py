"""What a module changes in place is recorded as it was before and after; equal contents are stored once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recorded_calls import only, recorded
from torch import Tensor, nn

from porter.golden.node import tensor_nodes
from porter.golden.recorder import recording
from porter.golden.sketch import sketch
from porter.golden.store import Golden


class InPlace(nn.Module):
    """Changes its argument, as fused add-norm kernels do; ``quietly`` without torch noticing."""

    def __init__(self, quietly: bool) -> None:
        super().__init__()
        self.quietly = quietly

    def forward(self, hidden: Tensor) -> Tensor:
        (hidden.data if self.quietly else hidden).mul_(2)
        return hidden


class Chain(nn.Module):
    def __init__(self, quietly: bool) -> None:
        super().__init__()
        self.first, self.second = InPlace(quietly), InPlace(quietly)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.second(self.first(hidden))  # type: ignore[no-any-return]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("quietly", [False, True])
def test_tensors_changed_in_place(quietly: bool, inference: bool, tmp_path: Path) -> None:
    model = Chain(quietly)
    with torch.inference_mode(inference), recording(model, tmp_path / "golden"):
        model(torch.arange(1.0, 101.0))
    golden = Golden.open(tmp_path / "golden")
    ones = torch.arange(1.0, 101.0)
    for module, (before, after) in {"": (1, 4), "first": (1, 2), "second": (2, 4)}.items():
        inputs, outputs = only(golden, module)
        assert torch.equal(inputs["args"][0], before * ones), module
        assert torch.equal(outputs, after * ones), module


class OneElement(nn.Module):
    def __init__(self, quietly: bool) -> None:
        super().__init__()
        self.quietly = quietly

    def forward(self, hidden: Tensor) -> Tensor:
        (hidden.data if self.quietly else hidden)[37] = -1
        return hidden


@pytest.mark.parametrize("quietly", [False, True])
def test_one_element_changed_in_place(quietly: bool, tmp_path: Path) -> None:
    golden = recorded(nn.Sequential(OneElement(quietly)), tmp_path / "golden", (torch.arange(1000.0),))
    inputs, outputs = only(golden, "0")
    assert inputs["args"][0][37] == 37 and outputs[37] == -1


@pytest.mark.parametrize("quietly", [False, True])
def test_sketches_and_statistics_of_what_changed_in_place(quietly: bool, tmp_path: Path) -> None:
    values = torch.randn(40_000, generator=torch.Generator().manual_seed(0))
    golden = recorded(Chain(quietly), tmp_path / "golden", (values.clone(),), detail="sketch")
    for module, factor in {"": 4, "first": 2, "second": 4}.items():
        (found,) = [r for r in golden.records if r.module == module]
        held = golden.sketch(found.outputs["tensor"])
        torch.testing.assert_close(held.values, sketch(factor * values).values, rtol=1e-5, atol=1e-4)
        assert found.outputs["stats"]["max"] == factor * float(values.max())


def test_same_content_is_stored_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity(), nn.ReLU())
    golden = recorded(model, tmp_path / "golden", (torch.ones(100, 100),))
    assert len({node["tensor"] for r in golden.records for node in tensor_nodes(r.outputs)}) == 1
    assert (tmp_path / "golden" / "tensors.bin").stat().st_size == 40_000
