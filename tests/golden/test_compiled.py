"""Recording around compiled regions: what is seen is exact, what is not is listed with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import porter
from porter.cli.app import run
from porter.errors import PorterError
from porter.golden.node import tensor_nodes
from porter.golden.store import Golden
from porter.golden.unseen import NEVER_SEEN

Build = Callable[..., nn.Module]
IDS = torch.tensor([[5, 11, 2, 40, 7, 23, 1]])
MLP = "model.layers.0.mlp"
INSIDE = {f"{MLP}.{name}" for name in ("gate_proj", "up_proj", "down_proj", "act_fn")}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _module(model: Any) -> None:
    model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp, backend="eager")


def _in_place(model: Any) -> None:
    model.model.layers[0].mlp.compile(backend="eager")


def _forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = torch.compile(mlp.forward, backend="eager")


def _function_within(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    compiled = torch.compile(mlp.forward, backend="eager", fullgraph=True)
    mlp.forward = lambda hidden: compiled(hidden)


def _recorded(model: nn.Module, path: Path) -> tuple[Golden, torch.Tensor]:
    with torch.no_grad(), porter.recording(model, path):
        logits: torch.Tensor = model(IDS).logits
    return Golden.open(path), logits


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    ("compile_part", "boundary", "why"),
    [
        (_module, True, f"inside {MLP}, which is compiled"),
        (_in_place, False, f"inside {MLP}, which takes no hooks"),
        (_forward, True, f"inside {MLP}, which is compiled"),
        (_function_within, True, "never called, or only within a compiled function"),
    ],
)
def test_compiled_parts_are_listed(
    qwen3: Build, tmp_path: Path, compile_part: Callable[[Any], None], boundary: bool, why: str, warm: bool
) -> None:
    model = qwen3()
    own, expected = _recorded(qwen3(), tmp_path / "own")
    compile_part(model)
    if warm:
        with torch.no_grad():
            model(IDS)
    golden, logits = _recorded(model, tmp_path / "golden")
    assert torch.equal(logits, expected), "recording must not change what is computed"
    missed = {entry["module"]: entry["why"] for entry in golden.manifest["missed"]}
    assert set(missed) == INSIDE | (set() if boundary else {MLP})
    assert all(missed[name].startswith(why) for name in INSIDE)
    assert boundary or "compiled" in missed[MLP]
    seen = {record.module: record for record in golden.records}
    every = {record.module for record in own.records}
    assert set(seen) == every - set(missed), "all that is not listed is recorded"
    for record in own.records:
        if record.module in seen and record.module:
            mine = seen[record.module]
            digests = [[node["digest"] for node in tensor_nodes(each.outputs)] for each in (mine, record)]
            assert mine.kind == record.kind and digests[0] == digests[1]


def test_a_golden_around_a_compiled_part_is_used(qwen3: Build, tmp_path: Path) -> None:
    model = qwen3()
    _module(model)
    golden = porter.capture(model, IDS, tmp_path / "golden", new_tokens=2)
    report = porter.align(golden, qwen3())
    assert report.verdict == "aligned"
    gaps = [check for check in report.sanity if check.check == "gap"]
    assert any("which is compiled" in check.says for check in gaps)
    wrong: Any = qwen3()
    wrong.model.layers[0].mlp.gate_proj.weight.data *= 1.01
    assert porter.align(golden, wrong).verdict == "drift"


def test_a_model_compiled_whole_is_refused(qwen3: Build, tmp_path: Path) -> None:
    whole: Any = qwen3()
    whole.forward = torch.compile(whole.forward, backend="eager")
    for model in (whole, torch.compile(qwen3(), backend="eager")):
        with pytest.raises(PorterError, match=r"compiled: .*; record the eager model"):
            _recorded(model, tmp_path / "golden")


def test_modules_that_nothing_calls(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.used(hidden)
            return found

    with porter.recording(model := Model(), tmp_path / "golden"):
        model(torch.ones(1, 2))
    missed = Golden.open(tmp_path / "golden").manifest["missed"]
    assert [entry["module"] for entry in missed] == ["idle"]
    assert missed[0]["why"] == NEVER_SEEN


def test_show_lists_them(qwen3: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = qwen3()
    _forward(model)
    _recorded(model, tmp_path / "golden")
    assert run(["golden", "show", str(tmp_path / "golden")]) == 0
    assert f"missed: {MLP}.up_proj: inside {MLP}, which is compiled" in capsys.readouterr().out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graph_capture_is_survived_and_listed(qwen3: Build, tmp_path: Path) -> None:
    model: Any = qwen3().cuda()
    hidden = torch.randn(1, 4, 32, device="cuda")
    mlp, forward = model.model.layers[0].mlp, model.model.layers[0].mlp.forward
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        forward(hidden)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), porter.recording(model, tmp_path / "golden"):
        with torch.cuda.graph(graph, stream=stream):
            output = mlp(hidden)
        graph.replay()
        model.lm_head(hidden)
    torch.testing.assert_close(output, forward(hidden))
    missed = {entry["module"]: entry["why"] for entry in Golden.open(tmp_path / "golden").manifest["missed"]}
    assert "graph capture" in missed[MLP] and "graph capture" in missed[f"{MLP}.up_proj"]
