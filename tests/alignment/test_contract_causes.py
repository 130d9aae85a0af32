"""What the lint found, once the replay has confirmed it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_sides import Sides, bound, kept_wide
from planted import deepseek_v3, golden_of, qwen2
from torch import Tensor

import porter
from porter.alignment.contract_lint.kinds import KINDS
from porter.alignment.contract_lint.lint import confirmed_causes
from porter.alignment.report import Cause, LintFinding, ModuleRow


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    torch.set_num_threads(1)
    model = qwen2()
    return model, golden_of(model, tmp_path_factory.mktemp("dense") / "golden")


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    torch.set_num_threads(1)
    model = deepseek_v3()
    return model, golden_of(model, tmp_path_factory.mktemp("sparse") / "golden")


def row(module: str, introduced: float, status: str = "drift") -> ModuleRow:
    return ModuleRow(module, module, 0, introduced=introduced, budget=1e-6, status=status)


def finding(module: str = "gate", kind: str = "router-dtype") -> LintFinding:
    return LintFinding(kind, module, "scores in line 3 of x.py", "float32", "bfloat16", False, KINDS[kind])


@pytest.mark.parametrize(
    ("findings", "rows", "kinds"),
    [
        ([finding()], [row("gate", 3e-3)], [("router-dtype", 0.9)]),
        ([finding()], [row("gate", 3e-3, "ok")], []),
        ([finding()], [row("other", 3e-3)], []),
        ([finding()], [row("gate", 0.4)], []),
        ([finding(kind="softmax-dtype")], [row("gate", 3e-3)], [("low-precision", 0.9)]),
        ([finding(kind="config")], [row("gate", 3e-3)], []),
        ([finding(), finding()], [row("gate", 3e-3)], [("router-dtype", 0.9)]),
    ],
)
def test_only_what_the_replay_confirms_becomes_a_cause(findings: Any, rows: Any, kinds: Any) -> None:
    causes = confirmed_causes(findings, rows, [], torch.bfloat16)
    assert [(cause.kind, cause.confidence) for cause in causes] == kinds


def test_a_cause_known_with_confidence_comes_first() -> None:
    known = [Cause("router-bias", "gate", 0.99, 3e-3, 0.0, "add the bias")]
    (cause,) = confirmed_causes([finding()], [row("gate", 3e-3)], known, torch.bfloat16)
    assert cause.confidence == 0.5
    assert (
        confirmed_causes(
            [finding()], [row("gate", 3e-3)], [Cause("router-dtype", "gate", 0.9, 1.0, 0.0, "")], torch.bfloat16
        )
        == []
    )


@pytest.mark.parametrize("recorded", [torch.float32, torch.bfloat16], ids=str)
def test_a_gate_that_scores_in_bfloat16_is_a_drift_with_its_cause(
    sparse: Sides, tmp_path: Path, recorded: torch.dtype
) -> None:
    model, golden = sparse
    source = kept_wide(model)
    if recorded == torch.bfloat16:
        golden = golden_of(source, tmp_path / "golden")
    candidate = copy.deepcopy(source)
    gate = candidate.model.layers[1].mlp.gate
    forward = type(gate).forward

    def narrowed(self: Any, hidden_states: Tensor) -> Any:
        logits, weights, experts = forward(self, hidden_states)
        return logits.to(torch.bfloat16).float(), weights, experts

    bound(gate, narrowed)
    report = porter.align(golden, candidate, passes="replay")
    assert report.verdict == "drift" and report.first_drift is not None
    assert report.first_drift.module == "model.layers.1.mlp.gate"
    assert any(f.kind == "router-dtype" and "line" in f.what for f in report.lint)
    assert "router-dtype" in {cause.kind for cause in report.causes}
    assert porter.align(golden, copy.deepcopy(source), passes="replay").verdict == "aligned"
